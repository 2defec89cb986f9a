"""The main job on a fresh machine: plan an 8B model for eight H100, then plan and really train a small one here.

Run by ``make demo``. Everything it writes is in demo-output/. It fails if the loss does not fall, if transformers can't
load what was trained, or if a command fails.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "demo-output"
PLANNER = Path(sys.executable).with_name("planner")
SEQ_LEN, BATCH, STEPS = 256, 16, 40
HELD_OUT_MARGIN = 1.0
"""Nats between the loss of training and that of unseen text; an untrained model is 2 or more away."""
AGREEMENT = 2.0
"""Predicted over measured step time that counts as agreeing."""


def main() -> int:
    """Run all parts; returns the exit code."""
    sys.path.insert(0, str(Path(__file__).parent))
    import tiny_qwen3

    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    os.environ["TRAINPLAN_CACHE"] = str(OUTPUT / "cache")  # the demo's profile is its own
    (OUTPUT / "cache").mkdir()
    times: dict[str, float] = {}

    with part("plan Qwen3-8B for eight H100", times):
        planner(
            "tune",
            "Qwen/Qwen3-8B",
            "--cluster",
            "8xH100",
            "--seq-len",
            "4096",
            "--global-batch-size",
            "256",
            "-o",
            OUTPUT / "qwen3-8b.yaml",
        )

    corpus, model = OUTPUT / "corpus.jsonl", OUTPUT / "model"
    with part("make a small Qwen3, its tokenizer and a corpus", times):
        modules = tiny_qwen3.write_corpus(corpus)
        tiny_qwen3.make_tokenizer(corpus, model)
        parameters = tiny_qwen3.make_model(model)
        lengths = tiny_qwen3.length_histogram(corpus, model, SEQ_LEN)
        (OUTPUT / "lengths.json").write_text(json.dumps(lengths), encoding="utf-8")
        say(f"{parameters:,} parameters, {modules} standard library modules, {corpus.stat().st_size / 1e6:.1f} MB")

    with part("measure this machine", times):
        planner("profile", "--nproc", ranks(), "--seconds", 15)

    plan = OUTPUT / "plan.yaml"
    with part("plan the small model for this machine", times):
        planner(
            *(
                "tune",
                model,
                "--cluster",
                "local",
                "--seq-len",
                SEQ_LEN,
                "--global-batch-size",
                BATCH,
                "--precision",
                "fp32",
            ),
            *("--lengths", OUTPUT / "lengths.json", "-o", plan),
        )

    run = OUTPUT / "run"
    with part(f"train it for {STEPS} steps", times):
        planner(
            *("run", plan, "--model-dir", model, "--data", corpus, "--output", run, "--steps", STEPS),
            *("--learning-rate", "1e-3", "--warmup-steps", 5, "--log-every", 5),
        )

    with part("check what came out", times):
        ok = all((check_loss(run), check_export(run), compare(plan, run)))
    say("times: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in times.items()))
    say(f"{'done' if ok else 'FAILED'} in {sum(times.values()):.0f} s; all files are in {OUTPUT.relative_to(ROOT)}/")
    return 0 if ok else 1


def ranks() -> int:
    """Processes to train with: two where there are as many GPUs or, without a GPU, cores."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2, torch.cuda.device_count() or cores)


class part:
    """A headed, timed part of the demo."""

    def __init__(self, name: str, times: dict[str, float]) -> None:
        self.name, self.times = name, times

    def __enter__(self) -> None:
        print(f"\n== {self.name}", flush=True)
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.times[self.name] = time.perf_counter() - self.start


def say(text: str) -> None:
    """Print a line of the demo itself."""
    print(f"demo: {text}", flush=True)


def planner(*arguments: object) -> None:
    """Run the command as a person would; the demo ends with its exit code if it fails."""
    words = [str(argument) for argument in arguments]
    shown = [str(Path(word).relative_to(ROOT)) if word.startswith(str(ROOT)) else word for word in words]
    print("$ planner " + " ".join(shown), flush=True)
    code = subprocess.run([str(PLANNER), *words], check=False).returncode
    if code:
        say(f"planner {words[0]} ended with exit code {code}.")
        sys.exit(code)


def steps(run: Path) -> list[dict[str, float]]:
    """The metrics of every step of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def check_loss(run: Path) -> bool:
    """Whether the last ten steps have a lower mean loss than the first ten."""
    losses = [step["loss"] for step in steps(run)]
    first, last = fmean(losses[:10]), fmean(losses[-10:])
    say(f"loss over {len(losses)} steps: mean of the first ten {first:.3f}, of the last ten {last:.3f}")
    if last < first:
        return True
    say("the loss did not fall. Look at demo-output/run/metrics.jsonl.")
    return False


def check_export(run: Path) -> bool:
    """Whether transformers loads the trained model and gives text it has not seen a loss near that of training."""
    import tiny_qwen3
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    held_out = OUTPUT / "held-out.jsonl"
    tiny_qwen3.write_corpus(held_out, held_out=True)
    texts = [json.loads(line)["text"] for line in held_out.open(encoding="utf-8")]
    rows = [ids[:SEQ_LEN] for ids in tokenizer(texts)["input_ids"] if len(ids) >= SEQ_LEN][:32]
    ids = torch.tensor(rows)
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    trained = fmean(step["loss"] for step in steps(run)[-10:])
    start = float(torch.log(torch.tensor(float(model.config.vocab_size))))
    say(f"transformers loads the checkpoint; held-out loss {loss:.3f}, training {trained:.3f}, untrained {start:.3f}")
    if abs(loss - trained) < HELD_OUT_MARGIN:
        return True
    say("the checkpoint is not the model that was trained: its held-out loss is out of range.")
    return False


def compare(plan: Path, run: Path) -> bool:
    """Print predicted beside measured step time; outside the factor, what differs."""
    from trainplan.costmodel.plan import Plan
    from trainplan.executor.measurement import FILE, Measurement

    estimate, measured = Plan.load(plan).estimate, Measurement.load(run / FILE)
    predicted = estimate.step_time_s.mid
    factor = measured.step_time_s / predicted
    ms = f"predicted {predicted * 1e3:.0f} ms, measured {measured.step_time_s * 1e3:.0f} ms"
    say(f"step time: {ms}, measured over predicted {factor:.2f}")
    if not 1 / AGREEMENT <= factor <= AGREEMENT:
        slowest, fastest = max(measured.samples_s), min(measured.samples_s)
        parts = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in estimate.breakdown_s.items())
        say(f"more than a factor of {AGREEMENT:.0f} apart. Predicted parts: {parts}.")
        loaded = "another load on this machine slowed the run"
        rates = "the measured rates of this machine are not those of this model's operations"
        say(
            f"Cause: waiting for data took {measured.data_wait_s * 1e3:.0f} ms of the measured step; steps took from "
            f"{fastest * 1e3:.0f} to {slowest * 1e3:.0f} ms: {loaded if slowest > 1.5 * fastest else rates}."
        )
    return True


if __name__ == "__main__":
    sys.exit(main())
