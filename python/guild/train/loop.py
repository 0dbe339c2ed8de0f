"""`guild train`: a small MoE language model learns Python from the standard library's own sources.

The loop goes round by round: a few steps of each learner, their rows to metrics.jsonl, and now and
then a validation or a checkpoint. No step draws from a generator that outlives it, so model and
optimiser are all that a checkpoint needs to continue bit for bit on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from guild.provenance import provenance
from guild.train.compare import comparison, mean_loss, steps_of, tokens_per_second
from guild.train.corpus import Corpus, load_corpus
from guild.train.generation import PROMPT, Sampling, generate, readable
from guild.train.interrupt import StopRequest
from guild.train.learner import Learner
from guild.train.plots import plot_run
from guild.train.progress import TrainingView
from guild.train.settings import Settings, changed_fields
from guild.train.speed import speed_summary
from guild.train.world import agreed, run_folder, writes, written_by_one

FINAL_STEPS = 50
FINAL_WINDOWS = 1024
_CHECK_WINDOWS = 128


@dataclass(frozen=True)
class Plan:
    """How and where a run happens; unlike `Settings` it does not change what is learnt.

    Attributes
    ----------
    out : Path
        Folder of the results.
    device : torch.device
        Where to compute.
    dtype : torch.dtype
        float32, or bfloat16 for autocast.
    moe : str
        Layer to train: "guild", "plain" or "fp8".
    compare : bool
        Train Guild's layer and the plain PyTorch one, interleaved; the checkpoint then holds both.
    fp8 : bool
        Train Guild in FP8 and in 16 bits, interleaved in the same way.
    resume : bool
        Continue from the folder's checkpoint; else a run that is there is moved aside.
    corpus : Path or None
        Folder of .py files in place of the standard library.
    check_every : int
        Steps between checkpoints, each followed by a validation.
    sample_bytes : int
        Length of the text written at the end.
    fsdp : bool
        Train on all ranks that torchrun has started.
    expert_parallel : int
        With fsdp, ranks that share the experts.
    keep_gathered : bool
        With fsdp, keep weights gathered from forward to backward.
    checkpoints : bool
        Whether any are written.
    cuda_graph : bool
        On a GPU, replay a CUDA graph of the step.
    """

    out: Path
    device: torch.device
    dtype: torch.dtype
    moe: str = "guild"
    compare: bool = False
    fp8: bool = False
    resume: bool = False
    corpus: Path | None = None
    check_every: int = 100
    sample_bytes: int = 320
    fsdp: bool = False
    expert_parallel: int = 1
    keep_gathered: bool = False
    checkpoints: bool = True
    cuda_graph: bool = True

    @property
    def layers(self) -> tuple[str, ...]:
        """The MoE layers that are trained, the one that is sampled from first."""
        if self.fp8:
            return "fp8", "guild"
        return ("guild", "plain") if self.compare else (self.moe,)

    @property
    def round_steps(self) -> int:
        """Steps between two clock readings; more on a GPU, which has to wait for each reading."""
        return 20 if self.device.type == "cuda" else 5

    @property
    def first_steps(self) -> int:
        """Steps of the first round: few on a GPU, where they compile and enter no median."""
        return 2 if self.device.type == "cuda" else self.round_steps


class Training:
    """One call of `guild train`, from the corpus to the summary, in a folder claimed for it."""

    def __init__(self, settings: Settings, plan: Plan, console: Console) -> None:
        self.settings, self.plan, self.console = settings, plan, console
        self.folder = run_folder(plan.out)
        self.step = self.rounds = 0  # rounds: of this call
        self._begun = 0  # the step that this call went on from
        self.saved: int | None = None  # step of the last checkpoint
        self._told: set[str] = set()  # learners whose steps are no CUDA graph
        state = self.folder.load_checkpoint() if plan.resume else None
        if state is not None:
            _check_resumable(state, settings, plan)
        self.corpus = load_corpus(plan.corpus, settings.context)
        if state is not None:
            _check_corpus(state, self.corpus)
        self.learners = [_learner(name, settings, plan) for name in plan.layers]
        if state is None:
            with written_by_one():
                self._say_moved(self.folder.start())
        else:
            self.step = self.saved = self._begun = state["step"]
            for learner in self.learners:
                learner.load(state["learners"][learner.name])
            with written_by_one():
                self.folder.cut_after(self.step, plan.layers)

    @property
    def is_finished(self) -> bool:
        """Whether the run to resume has already finished and left all of its results."""
        summary = self.folder.read_summary() if self.plan.resume else None
        return agreed(
            summary is not None and summary.get("steps") == self.step == self.settings.steps
        )

    def run(self, stop: StopRequest) -> dict[str, Any] | None:
        """Train to the end and return the summary, or None if `stop` came first."""
        self._introduce()
        try:
            with TrainingView(self.console, self.settings, self.step) as view:
                self._train(stop, view)
        finally:
            for learner in self.learners:
                learner.steps.release()
        return self._finish() if self.step == self.settings.steps else None

    def _train(self, stop: StopRequest, view: TrainingView) -> None:
        steps = self.settings.steps
        while self.step < steps and not stop.asked:
            self._validate(view)
            self._round(view)
            if self._is_check:
                self._save()  # before a validation: whoever stops the run may not wait for that
        if self.step == steps:
            self._validate(view)
        if self.step > 0 and self.saved != self.step:
            self._save()

    @property
    def _is_check(self) -> bool:
        """Whether a checkpoint and a validation belong after this step."""
        if self.step == self.settings.steps:
            return True
        return self.step > 0 and self.step % self.plan.check_every == 0

    def _round(self, view: TrainingView) -> None:
        check_every = self.plan.check_every
        to_check = check_every - self.step % check_every
        most = self.plan.round_steps if self.rounds else self.plan.first_steps
        count = min(most, to_check, self.settings.steps - self.step)
        # Swapped every round, so that neither learner always runs on the other's warm caches.
        swapped = self.rounds % 2 == 1
        self.rounds += 1
        rows: dict[str, list[dict[str, Any]]] = {}
        for learner in reversed(self.learners) if swapped else self.learners:
            rows[learner.name] = learner.round(self.corpus, self.step, count)
            if learner.steps.refusal and learner.name not in self._told:
                self._told.add(learner.name)
                self._say(f"{learner.name}: {learner.steps.refusal}")
        self.step += count
        self._append([row for learner in self.learners for row in rows[learner.name]])
        view.update(self.step, rows[self.learners[0].name][-1])

    def _validate(self, view: TrainingView) -> None:
        """Validate where that is due, unless it is done."""
        is_last = self.step == self.settings.steps
        if not self._is_check or agreed(writes() and self._is_validated(is_last)):
            return
        windows = self._windows(is_last)
        losses = {lr.name: lr.validate(self.corpus, windows) for lr in self.learners}
        for learner in self.learners:
            learner.expect_finite(f"the held-out loss after step {self.step}", losses[learner.name])
        self._append(
            [
                {"step": self.step, "moe": name, "validation_loss": loss, "windows": windows}
                for name, loss in losses.items()
            ]
        )
        view.validated(self.step, losses[self.learners[0].name])

    def _append(self, rows: list[dict[str, Any]]) -> None:
        with written_by_one():
            self.folder.append(rows)

    def _windows(self, is_last: bool) -> int:
        """Windows of a validation: whole batches."""
        batch = self.settings.batch
        return math.ceil((FINAL_WINDOWS if is_last else _CHECK_WINDOWS) / batch) * batch

    def _is_validated(self, is_last: bool) -> bool:
        return self._validation(is_last).keys() == set(self.plan.layers)

    def _validation(self, is_last: bool) -> dict[str, float]:
        """Validation loss of each layer after this step; is_last: on the final windows."""
        return {
            row["moe"]: row["validation_loss"]
            for row in self.folder.rows()
            if row["step"] == self.step
            and "validation_loss" in row
            and (not is_last or row.get("windows") == self._windows(is_last))
        }

    def _save(self) -> None:
        if not self.plan.checkpoints:
            return
        for learner in self.learners:
            learner.expect_usable(self.corpus, self.step)  # else an earlier one is worth more
        state = {
            "step": self.step,
            "settings": self.settings.as_dict(),
            "dtype": str(self.plan.dtype),
            "corpus": self.corpus.digest,
            "learners": {learner.name: learner.state() for learner in self.learners},
        }
        with written_by_one():  # a rank that ended before would have torchrun end all
            self.folder.save_checkpoint(state)
        self.saved = self.step

    def _say_moved(self, aside: Path | None) -> None:
        if aside is not None:
            self._say(f"moved the run that was in {self.plan.out} to {aside}")

    def _say(self, line: str) -> None:
        """Print a line that may hold a path: no wrapping, no colours, brackets as they are."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _introduce(self) -> None:
        weights = sum(weight.numel() for weight in self.learners[0].model.parameters())
        verb = f"continuing at step {self.step}" if self.plan.resume else "training"
        self.console.print(
            f"{verb}: {' and '.join(self.plan.layers)}, {weights:,} weights, "
            f"{self.settings.experts} experts of width {self.settings.intermediate}, "
            f"top {self.settings.top_k}, {str(self.plan.dtype).removeprefix('torch.')} "
            f"on {self.plan.device}"
        )
        self.console.print(
            f"corpus: {self.corpus.files} files, {self.corpus.train.numel():,} bytes to learn "
            f"from, {self.corpus.held_out.numel():,} held out",
            highlight=False,
        )

    def _timed(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of this call, on this machine, after its first round; of all calls if none."""
        first = self.plan.first_steps
        for after in (self._begun + first, self._begun, first):
            if timed := [row for row in rows if row["step"] > after and "loss" in row]:
                return timed
        return rows

    def _finish(self) -> dict[str, Any]:
        sample = self._sample()
        if not writes():  # the rank that writes has all that follows
            return {}
        rows, validation = self.folder.rows(), self._validation(is_last=True)
        timed = self._timed(rows)
        main, s = self.learners[0], self.settings
        last = steps_of(rows, main.name)[-FINAL_STEPS:]
        steps = [[row["step"] for row in steps_of(rows, name)] for name in self.plan.layers]
        if steps[0] != steps[-1]:
            raise ValueError(
                f"resume: {str(self.folder.metrics)!r} has other steps of "
                f"{self.plan.layers[0]} than of {self.plan.layers[-1]}"
            )
        windows = self._windows(is_last=True)
        summary = {
            "steps": s.steps,
            "tokens": s.steps * s.tokens_per_step,
            "final_train_loss": mean_loss(rows, main.name, FINAL_STEPS),
            "final_train_loss_is": f"mean of the last {len(last)} steps, nats per byte",
            "final_validation_loss": validation[main.name],
            "final_validation_loss_is": f"{windows} held-out windows of {s.context} bytes",
            "tokens_per_second": tokens_per_second(timed, main.name, s.tokens_per_step),
            "training_seconds": sum(row["seconds"] for row in steps_of(rows, main.name)),
            "busiest_expert_over_mean": sum(max(row["load"]) for row in last) / len(last),
            "moe": main.name,
            "dtype": str(self.plan.dtype).removeprefix("torch."),
            "cuda_graph": main.steps.captured,
            **provenance(self.plan.device),
            "settings": s.as_dict(),
            "corpus": {
                "files": self.corpus.files,
                "train_bytes": self.corpus.train.numel(),
                "held_out_bytes": self.corpus.held_out.numel(),
                "digest": self.corpus.digest,
            },
            "prompt": PROMPT.decode(),
            "sample": sample,
            **speed_summary(steps_of(timed, main.name)),
        }
        if len(self.learners) > 1:
            first, second = self.plan.layers
            summary["compare"] = {
                **comparison(rows, s.tokens_per_step, (first, second), timed),
                f"{second}_cuda_graph": self.learners[1].steps.captured,
                f"{second}_train_loss": mean_loss(rows, second, FINAL_STEPS),
                f"{second}_validation_loss": validation[second],
            }
        title = f"{s.steps} steps on {summary['device']}, {summary['dtype']}"
        with self.folder.replacing(self.folder.plot) as file:
            plot_run(rows, title, file)
        self.folder.write_summary(summary)  # last, as it marks the run as complete
        return summary

    def _sample(self) -> str:
        """What the model writes after the prompt."""
        if self.plan.fsdp:
            return readable(self.learners[0].sample(PROMPT, self.plan.sample_bytes))
        model, s = self.learners[0].model.eval(), self.settings
        with self.learners[0].autocast():
            sampling = Sampling(seed=s.seed)
            written = generate(model, PROMPT, self.plan.sample_bytes, s.context, sampling)
        return readable(written.text[len(PROMPT) :])


def _learner(name: str, settings: Settings, plan: Plan) -> Learner:
    if not plan.fsdp:
        return Learner(name, settings, plan.device, plan.dtype, plan.cuda_graph)
    from guild.train.sharded import ShardedLearner

    how = plan.device, plan.dtype, plan.expert_parallel, plan.keep_gathered, plan.cuda_graph
    return ShardedLearner(name, settings, *how)


def _check_resumable(state: dict[str, Any], settings: Settings, plan: Plan) -> None:
    """Reject a checkpoint that this run would not continue faithfully."""
    saved = Settings(**state["settings"])
    if settings.steps < state["step"]:
        raise ValueError(
            f"steps: the checkpoint is already at step {state['step']}, got {settings.steps}"
        )
    for name in changed_fields(saved, settings):
        if name == "steps":  # resuming may extend a run
            continue
        raise ValueError(
            f"{name}: the checkpoint was trained with {getattr(saved, name)}, "
            f"got {getattr(settings, name)}; leave it out or start without --resume"
        )
    if state["dtype"] != str(plan.dtype):
        raise ValueError(
            f"dtype: the checkpoint was trained in {state['dtype'].removeprefix('torch.')}, "
            f"got {str(plan.dtype).removeprefix('torch.')}"
        )
    if set(state["learners"]) != set(plan.layers):
        raise ValueError(
            f"resume: the checkpoint holds {' and '.join(state['learners'])}, this run trains "
            f"{' and '.join(plan.layers)}; give the same --moe, --compare and --fp8 as before"
        )


def _check_corpus(state: dict[str, Any], corpus: Corpus) -> None:
    """Reject other bytes than a checkpoint was trained on."""
    if state["corpus"] != corpus.digest:
        raise ValueError(
            f"corpus: the checkpoint was trained on bytes with checksum {state['corpus']}, these "
            f"have {corpus.digest}; resume with the same Python and --corpus"
        )
