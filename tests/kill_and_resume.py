"""Trainings that write the loss of every update to a file: what `test_kill_and_resume.py` starts and kills.

python kill_and_resume.py digits|llama FOLDER KILLS SEED
"""

import importlib
import json
import os
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
    digits = ("implicit_attention.cli.inpaint", "sklearn.datasets", "torch._dynamo")
    llama = ("transformers.trainer", "transformers.models.llama.modeling_llama", "torch._dynamo", "accelerate")
    for module in digits if name == "digits" else llama:
        importlib.import_module(module)


def digits(folder):
    """The command `train inpaint` on its digits, with a small model."""
    from implicit_attention.cli import inpaint, inpainting_data, training
    from implicit_attention.cli.progress import Progress
    from implicit_attention.cli.settings import InpaintSettings

    inpaint.RECIPES["digits"] = inpaint.Recipe(8, 2, 4, 8, batch=4, rate=3e-3)
    inpaint.QUICK_IMAGES = 6
    inpainting_data.ImageTask.epoch = 4 * EVERY["digits"]
    update, optimizer_of = training._update, training._optimizer
    schedules = []

    def made(*arguments):
        optimizer, schedule = optimizer_of(*arguments)
        schedules.append(schedule)
        return optimizer, schedule

    def logged(*arguments):
        loss = update(*arguments)
        log(folder, schedules[-1].last_epoch + 1, loss)
        return loss

    training._update, training._optimizer = logged, made
    resume = (folder / "checkpoint.pt").exists()
    length = {} if resume else {"updates": UPDATES["digits"]}
    settings = InpaintSettings(quick=True, out=folder, resume=resume, mode="equilibrium", **length)
    with Progress(lambda row: row["line"]) as progress:
        inpaint.inpaint(settings, progress)


def llama(folder):
    """A converted Llama under the Trainer of transformers, with dropout, which draws from torch's generator."""
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


TRAININGS = {"digits": digits, "llama": llama}


def started(name, folder):
    """The number of a process that trains in the folder, from the last checkpoint there if there is one."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return child
    try:
        TRAININGS[name](folder)
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


def main(name, folder, kills, seed):
    """Train once undisturbed, in `whole`; then in `cut0`, `cut1`, ... until so many processes were killed."""
    loaded(name)
    random = Random(seed)
    child = started(name, folder / "whole")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run, killed = 0, 0
    while True:
        cut = folder / f"cut{run}"
        before = len(updates(cut)) if cut.exists() else 0
        child = started(name, cut)
        lines, later = before + random.randint(1, 2 * EVERY[name]), random.uniform(0.0, 0.02)
        while killed < kills and (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if len(updates(cut)) >= lines:
                # Perhaps in the middle of an update, or of a checkpoint.
                time.sleep(later)
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
                break
            time.sleep(0.001)
        else:
            ended = ended if killed < kills else os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(ended[1])
        assert code in (0, -signal.SIGKILL), code
        killed += code != 0
        if code == 0:
            if killed == kills:
                break
            run += 1
    (folder / "killed.json").write_text(json.dumps({"killed": killed, "runs": run + 1}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
