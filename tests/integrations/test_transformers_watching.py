"""`watch` of converted models of transformers, and `WatchCallback` in its Trainer."""

import copy
import csv
import math
import pickle

import pytest
import torch
import transformers as hf
from torch import nn
from transformers_models import batch, make, watched_calls

from implicit_attention import Picard
from implicit_attention.integrations.transformers import WatchCallback, attach, last_solves, learn_anchors
from implicit_attention.training import CSVFile, watch

LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
HEADS, ROWS, TOKENS, STEPS = 4, 2, 9, 3
FEW = Picard(rtol=1e-5, max_steps=4)


def converted(name="llama", **options):
    options = {"on_failure": "ignore", "anchor": 0.6, **options}
    return attach(make(name, torch.float32), **options).train()


def given(step, name="llama"):
    found = batch(name, rows=ROWS + step, length=TOKENS + step, seed=step)
    return {key: value for key, value in found.items() if key != "position_ids"}


def train(model, call=None, steps=STEPS, name="llama"):
    """Steps of a training; returns lists of what every call of every layer came to, forward and backward."""
    found = []
    for step in range(steps):
        inputs = given(step, name)
        logits = (model if call is None else call)(**inputs).logits
        logits.log_softmax(-1)[..., 0].mean().backward()
        found.append(dict(last_solves(model)))
    return found


def numbers(reports, names, side):
    """Calls, problems, evaluations, failures and the worst residual of the reports of some layers."""
    chosen = [step[name] for step in reports for name in names]
    fields = []
    for report in chosen:
        told, evaluations = (report, "num_evals") if side == "forward" else (report.adjoint, "num_steps")
        fields.append((told.status, getattr(told, evaluations), told.residual, told.tolerance))
    status, evaluations, residual, tolerance = (torch.cat([f[i].flatten() for f in fields]) for i in range(4))
    ordered = evaluations.sort().values
    return {
        "calls": len(chosen),
        "problems": len(status),
        "mean": float(evaluations.double().mean()),
        "p99": float(ordered[math.ceil(0.99 * len(ordered)) - 1]),
        "most": int(ordered[-1]),
        "failed": int((status > 3).sum()),
        "worst": float((residual.double() / tolerance.double().clamp(min=1e-300)).max()),
    }


def check(observed, reports, names=LAYERS):
    assert [seen.layer for seen in observed.layers] == names
    for seen, chosen in [*zip(observed.layers, ([name] for name in names), strict=True), (observed.total, names)]:
        for side in ("forward", "backward"):
            for name, value in numbers(reports, chosen, side).items():
                assert getattr(getattr(seen, side), name) == pytest.approx(value, rel=1e-6), (seen.layer, side, name)


# Models.


@pytest.mark.parametrize("options", [{}, {"solver": FEW}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_counts_are_those_of_the_reports(name, options):
    model = converted(name, **options)
    train(model, steps=1, name=name)
    names = list(last_solves(model))
    model = converted(name, **options)
    with watch(model) as seen:
        for _ in range(2):
            reports = train(model, name=name)
            observed = seen.take()
            check(observed, reports, names)
    assert (observed.total.forward.failed > 0) == bool(options)


def test_attention_that_was_not_converted_is_not_watched():
    model = make("llama", torch.float32)
    with pytest.raises(ValueError, match=r"have a layer that solves, got LlamaForCausalLM; .*attach\(model\)"):
        watch(model)
    watch(attach(model)).close()


def test_anchors_and_temperatures():
    model = converted()
    learned = learn_anchors(model, 0.7)
    with torch.no_grad():
        next(iter(learned.values())).add_(torch.linspace(-1, 1, HEADS))
    with watch(model) as seen:
        train(model, steps=1)
        first, second = seen.take().layers
    expected = [float((1e-4 + (1 - 2e-4) * torch.sigmoid(logit.detach())).mean()) for logit in learned.values()]
    assert [first.anchor, second.anchor] == pytest.approx(expected)
    assert first.beta == second.beta == pytest.approx(8**-0.5)
    assert math.isnan(first.spectral_radius)


def radius_of(query, keys, anchor=0.6, beta=8**-0.5):
    """The largest spectral radius of causal maps of the first row of a batch, by plain steps and dense matrices."""
    query, keys = query[0], keys[0].repeat_interleave(2, dim=0)
    allowed, z = torch.ones(query.shape[1], keys.shape[1]).tril().bool(), query
    for _ in range(1000):
        weights = (beta * z @ keys.mT).masked_fill(~allowed, -math.inf).softmax(-1)
        z = anchor * query + (1 - anchor) * weights @ keys
    inner = torch.diag_embed(weights) - weights[..., :, None] * weights[..., None, :]
    jacobian = (1 - anchor) * beta * (keys[:, None].mT @ inner @ keys[:, None])
    return float(torch.linalg.eigvals(jacobian).abs().max())


def test_spectral_radii_are_those_of_dense_jacobians():
    model = converted().double()
    with watched_calls() as calls, watch(model, spectral=True) as seen:
        reports = train(model, steps=1)
        observed = seen.take()
        check(observed, reports)
    expected = [radius_of(query, keys) for query, keys, _ in calls]
    assert [layer.spectral_radius for layer in observed.layers] == pytest.approx(expected, rel=1e-2)
    assert observed.total.spectral_radius == pytest.approx(max(expected), rel=1e-2)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_not_watched(duplicate):
    model = converted()
    keys = list(model.state_dict())
    with watch(model) as seen:
        train(model, steps=1)
        other = duplicate(model)
        train(other, steps=2)
        assert seen.take().total.forward.calls == 2
        with watch(other) as copied:
            train(other, steps=1)
            assert copied.take().total.forward.calls == 2
        assert seen.take().total.forward.calls == 0
        assert list(model.state_dict()) == keys
    model = duplicate(other)
    watch(model).close()


def test_programs_hold_no_trace_of_it():
    model = converted(on_failure="warn").eval()
    with watch(model) as seen, torch.no_grad():
        program = torch.export.export(model, (), {**given(0), "use_cache": False})
        assert "tally" not in str(program.graph)
        program.module()(**given(0), use_cache=False)
        assert seen.take().total.forward.calls == 0


# Engines.


# The Trainer.


def texts(count=8):
    ids = torch.randint(2, 50, (count, TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(tmp_path, *callbacks, model=None, **options):
    options = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 2, **options}
    options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    model = converted() if model is None else model
    arguments = hf.TrainingArguments(str(tmp_path), **options)
    trainer = hf.Trainer(model, arguments, train_dataset=texts(), eval_dataset=texts(2), callbacks=list(callbacks))
    trainer.train()
    return trainer


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.found = []

    def write(self, observed):
        self.found.append(observed)


PROBLEMS = 2 * 2 * HEADS * TOKENS  # of one step: layers, rows, heads and tokens


@pytest.mark.parametrize("options", [{}, {"solver": FEW}])
def test_every_log_of_a_loss_holds_what_was_solved_since(tmp_path, options):
    kept, path = Kept(), tmp_path / "seen.csv"
    trainer = trained(tmp_path, WatchCallback(kept, CSVFile(path)), model=converted(**options))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [observed.step for observed in kept.found] == [2, 4]
    for entry, observed in zip(logged, kept.found, strict=True):
        total = observed.total
        assert (total.forward.problems, total.backward.problems) == (2 * PROBLEMS, 2 * PROBLEMS)
        assert entry["equilibrium_evaluations"] == total.forward.mean
        assert entry["equilibrium_failed"] == total.forward.failed / (2 * PROBLEMS)
        assert entry["equilibrium_backward_failed"] == total.backward.failed / (2 * PROBLEMS)
        assert entry["equilibrium_worst"] == total.forward.worst
        assert (entry["equilibrium_failed"] > 0) == bool(options)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["layer"]) for row in rows] == [(step, name) for step in "24" for name in (*LAYERS, "all")]
    assert [float(row["forward_mean"]) for row in rows[2::3]] == [o.total.forward.mean for o in kept.found]
    # The summary at the end, of a run whose last step was logged, has nothing to add.
    assert "equilibrium_evaluations" not in trainer.state.log_history[-1]


def test_steps_after_the_last_loss_are_in_the_summary(tmp_path):
    kept = Kept()
    trainer = trained(tmp_path, WatchCallback(kept), max_steps=5)
    assert [observed.step for observed in kept.found] == [2, 4, 5]
    assert sum(observed.total.forward.problems for observed in kept.found) == 5 * PROBLEMS
    summary = trainer.state.log_history[-1]
    assert "train_loss" in summary
    assert summary["equilibrium_evaluations"] == kept.found[-1].total.forward.mean


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
        {"bf16": True},
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.slow),
    ],
)
def test_no_engine_of_the_trainer_counts_twice(tmp_path, options):
    torch.compiler.reset()
    kept = Kept()
    trained(tmp_path, WatchCallback(kept), **options)
    assert [observed.total.forward.problems for observed in kept.found] == [2 * PROBLEMS] * 2
    assert [observed.total.backward.problems for observed in kept.found] == [2 * PROBLEMS] * 2
    assert [layer.layer for layer in kept.found[0].layers] == LAYERS


def test_evaluations_of_the_trainer_count_at_the_next_loss(tmp_path):
    kept = Kept()
    trained(tmp_path, WatchCallback(kept), eval_strategy="steps", eval_steps=2)
    extra = [observed.total.forward.problems - observed.total.backward.problems for observed in kept.found]
    # That of the last step is in the summary.
    assert extra == [0, PROBLEMS, PROBLEMS]


class Stop(hf.TrainerCallback):
    """Ends a training as an interruption does."""

    def on_step_end(self, args, state, control, **others):
        raise KeyboardInterrupt


@pytest.mark.slow
def test_after_a_training_the_model_is_free_also_after_one_that_was_interrupted(tmp_path):
    model, kept = converted(), Kept()
    callback = WatchCallback(kept)
    trained(tmp_path, callback, model=model)
    assert callback.watch is None
    watch(model).close()
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, callback, Stop(), model=model)
    kept.found.clear()
    trained(tmp_path, callback, model=model)
    assert [observed.total.forward.problems for observed in kept.found] == [2 * PROBLEMS] * 2


def test_what_does_not_write_is_refused():
    for wrong in (None, "seen.csv", CSVFile):
        with pytest.raises(TypeError, match=r"`writers` must be made of objects with write\(observed\), got .*CSVFile"):
            WatchCallback(wrong)
    with pytest.raises(ValueError, match="must have a layer that solves"):
        WatchCallback().on_train_begin(None, None, None, model=nn.Linear(2, 2))
