"""Trainings that write the loss of every update to a file: what `test_kill_and_resume.py` starts and kills.

python kill_and_resume.py digits|llama FOLDER RUNS KILLS SEED
"""

import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from random import Random

import torch

UPDATES = {"digits": 16, "llama": 20}
#: Updates between two checkpoints.
EVERY = {"digits": 4, "llama": 3}


def log(folder, update, loss):
    """Add a line; it is on the disk when this returns."""
    with (folder / "losses.jsonl").open("a") as file:
        file.write(json.dumps([update, loss.hex()]) + "\n")
        file.flush()
        os.fsync(file.fileno())


def loaded(name):
    """Import what a training needs, once for all processes that are forked."""
    digits = ("implicit_attention.studies.inpainting", "sklearn.datasets", "torch._dynamo")
    llama = ("transformers.trainer", "transformers.models.llama.modeling_llama", "torch._dynamo", "accelerate")
    for module in digits if name == "digits" else llama:
        importlib.import_module(module)


def digits(folder):
    """The command `train inpaint` on its digits, with a small model; its weights."""
    from implicit_attention.cli.inpaint import Inpaint
    from implicit_attention.cli.progress import Progress
    from implicit_attention.studies import inpainting, inpainting_data, training

    inpainting.RECIPES["digits"] = inpainting.Recipe(8, 2, 4, 8, batch=4, rate=3e-3)
    inpainting.QUICK_IMAGES = 6
    inpainting_data.ImageTask.epoch = 4 * EVERY["digits"]
    update, optimizer_of = training.make_update, training._optimizer
    schedules = []

    def made(*arguments):
        optimizer, schedule = optimizer_of(*arguments)
        schedules.append(schedule)
        return optimizer, schedule

    def logged(*arguments):
        loss = update(*arguments)
        log(folder, schedules[-1].last_epoch + 1, loss)
        return loss

    training.make_update, training._optimizer = logged, made
    resume = (folder / "checkpoint.pt").exists()
    length = {} if resume else {"updates": UPDATES["digits"]}
    command = Inpaint(quick=True, out=folder, resume=resume, mode="equilibrium", **length)
    with Progress(lambda row: row["line"]) as progress:
        command.run(progress)
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def llama(folder):
    """A converted Llama under the Trainer of transformers, with dropout, which draws from torch's generator.

    Its weights.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    from implicit_attention.integrations.transformers import attach, last_whole_checkpoint

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 0}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=0.1))
    attach(model, anchor=0.9, on_failure="ignore")
    codes = torch.randint(1, 50, (64, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in codes]

    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            if "loss" in logs:
                log(folder, state.global_step, logs["loss"])

    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=UPDATES["llama"],
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        save_steps=EVERY["llama"],
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        save_total_limit=None,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Losses()])
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder / "run"))
    return model.state_dict()


TRAININGS = {"digits": digits, "llama": llama}


def started(name, folder):
    """The number of a process that trains in the folder, from the last checkpoint there if there is one."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return child
    try:
        torch.save(TRAININGS[name](folder), folder / "final.pt")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def updates(folder):
    """The losses in the file, (update, loss as text) each; a last line may be cut off."""
    file = folder / "losses.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(name, cut, wanted, later):
    """The update that a process had reached when it was killed, soon after the wanted one; None if it had ended."""
    before = len(updates(cut)) if cut.exists() else 0
    child = started(name, cut)
    while all(update < wanted for update, _ in updates(cut)[before:]):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return None
        time.sleep(0.001)
    # Perhaps in the middle of an update, or of a checkpoint.
    time.sleep(later)
    os.kill(child, signal.SIGKILL)
    code = ended(child)
    assert code in (0, -signal.SIGKILL), code
    reached = updates(cut)[-1][0]
    inside = code != 0 and reached < UPDATES[name] and not (cut / "final.pt").exists()
    return reached if inside else None


def main(name, folder, runs, kills, seed):
    """Train once undisturbed, in `whole`; then in `cut0`, `cut1`, ..., each killed so many times and then finished.

    `killed.json` lists the updates that each of these had reached when it was killed. A kill after the last update
    counts for nothing: its run begins anew.
    """
    loaded(name)
    random = Random(seed)
    assert ended(started(name, folder / "whole")) == 0
    # Everywhere in the training.
    places = random.sample(range(1, UPDATES[name]), runs * kills)
    told = []
    for run in range(runs):
        cut, reached = folder / f"cut{run}", [None]
        while None in reached:
            shutil.rmtree(cut, ignore_errors=True)
            wanted = sorted(places[run * kills : (run + 1) * kills])
            reached = []
            for place in wanted:
                if None not in reached:
                    reached.append(killed(name, cut, place, random.uniform(0.0, 0.02)))
        told.append(reached)
        assert ended(started(name, cut)) == 0
    (folder / "killed.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
