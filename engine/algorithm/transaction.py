"""The transactional update: collect groups one by one, then take a single optimiser step or none.

    begin(manifest, minibatch) -> add(group)* -> commit() | abort()

`begin` fixes the groups of the step and the divisor of the loss. The streamed update therefore equals the one-shot
update in every order of arrival. With `order: fixed`, gradients are added by group number, and the
result is equal bit for bit. A group without variance adds nothing but stays in the denominator. A group with a
non-finite reward or loss is skipped and counted. `abort` leaves no trace.

With `order: exact`, fixed slices of the step's groups are trained as they complete, as many groups each as fit into a
pass. Their gradients are added in fixed point (`gradient_sum.py`), so the bits are equal too.

All trained steps of a group go through the network together (time-step parallelism, TSP): the rows of a forward
pass are (image, step) pairs, or (image, noise level) pairs. The loss is the algorithm's (`objective.py`).

A pass that runs out of memory halves `Trainer.rows_per_forward`, and the optimiser step starts again with all groups
added until then. The gradient of the step is therefore the gradient of an undisturbed step of a job with that
`rows_per_forward`: bit for bit with `order: fixed`. Steps with another `rows_per_forward` differ by rounding, because
the sum over rows has another order.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.algorithm.advantages import group_advantages
from engine.algorithm.choice import objective_of
from engine.algorithm.gradient_sum import GradientSum
from engine.algorithm.health import EARLY, Health, figures_of, is_finite
from engine.algorithm.objective import FinishedGroup, Rows
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm_config import AlgorithmConfig
from engine.diffusion.sampler import Plan, log_prob, policy
from engine.diffusion.trajectory import Trajectory
from engine.models.adapter import DiTAdapter, rows
from engine.models.load import ReferencePolicy
from engine.models.merge import merges
from engine.out_of_memory import first_line, free_memory, is_out_of_memory, memory_of
from engine.parallel.sharding import whole_of
from engine.protocol.request import Manifest

LEAST_ROWS_OF_A_THREAD = 64
"""Fewest rows per thread on a CPU. With fewer rows, a further thread gains nothing."""


class DoesNotFit(Exception):
    """A training pass of a single row does not fit into the memory of its device."""


class Trainer:
    """Owns the optimiser and begins transactions (see the module docstring).

    Commit or abort a transaction before the next `begin`, which clears all gradients. The class does not check this.
    """

    def __init__(
        self,
        adapter: DiTAdapter,
        parameters: dict[str, nn.Parameter],
        config: AlgorithmConfig,
        reference: ReferencePolicy | None = None,
        *,
        workers_compile: bool = False,
    ) -> None:
        """Create the optimiser. `reference`: needed if the loss has a term that holds the weights near it.

        `workers_compile`: rollout workers compile blocks, which the trainer never does.
        """
        self.adapter = adapter
        self.parameters = parameters
        self.config = config
        self.rows_per_forward = config.rows_per_forward
        """Most rows of a pass. Starts at the job's number, and halves whenever a pass runs out of memory."""
        self.row_seconds = 0.0
        """Minimum seconds of a row, for drills and benchmarks."""
        self.pass_seconds = 0.0
        """Seconds that a pass takes beside its rows, for drills and benchmarks."""
        self.on_fewer_rows: Callable[[int, str], None] = lambda rows, error: None
        """Called after every halving, with the new number and the text of the memory error."""
        self.old = OldPolicy(parameters)
        self.computes_log_probs = workers_compile or merges(adapter.transformer)
        """True: workers compute with other rounding, so the log-probs at the rollout are the trainer's own."""
        self.objective = objective_of(config, self.old, reference, workers_differ=self.computes_log_probs)
        self.optimizer = torch.optim.AdamW(
            parameters.values(),
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def begin(
        self,
        manifest: Manifest,
        minibatch: int,
        plan: Plan,
        *,
        std: float | None = None,
        share: Sequence[int] | None = None,
    ) -> "Transaction":
        """Begin an optimiser step over the groups of a mini-batch.

        `std`: of the batch or of earlier batches, by mode. `share`: groups that this process trains; None: all. The
        caller adds the gradients of the other groups before `commit`.
        """
        return Transaction(self, manifest, minibatch, plan, std, share)

    def with_own_log_probs(self, prompt: str, trajectory: Trajectory, plan: Plan) -> Trajectory:
        """Recompute the trajectory's log-probs with the weights that made the rollout, if the loss uses them.

        Needed for a trajectory with steps at different SP degrees, whose log-probs were computed with different
        rounding. A pass without memory is halved and redone, like a training pass.
        """
        if not self.objective.needs_log_probs:
            return trajectory
        while True:
            try:
                return replace(trajectory, log_probs=self._log_probs(prompt, trajectory, plan))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                text = first_line(error)
            self.halve(len(plan.trained_steps), text)

    @torch.no_grad()
    def _log_probs(self, prompt: str, trajectory: Trajectory, plan: Plan) -> Tensor:
        steps = torch.tensor(plan.trained_steps)
        encoded, log_probs = self.adapter.encode([prompt]), []
        for some in torch.arange(len(steps)).split(self.rows_per_forward):
            x, next_x = trajectory.latents[some].to(self.device), trajectory.latents[some + 1].to(self.device)
            conditioning = rows(encoded, torch.zeros(len(some), dtype=torch.long, device=self.device))
            with self.old.active():
                mean, std = policy(self.adapter, plan, conditioning, x, steps[some].to(self.device))
            log_probs.append(log_prob(next_x, mean, std).cpu())
        return torch.cat(log_probs)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def halve(self, rows_of_pass: int, error: str) -> None:
        """Halve the rows of a pass. Call outside the `except` clause, whose error holds the tensors of its frames.

        `rows_of_pass`: most rows that a pass could have had, for example because there were no more. `error`: first
        line of the memory error. Raises DoesNotFit if the failed pass had a single row.
        """
        free_memory()
        largest = min(self.rows_per_forward, rows_of_pass)
        if largest == 1:
            raise DoesNotFit(
                f"one row (an image at one step) does not fit into {memory_of(self.device)}: {error}; "
                "use model.checkpointing: on, weights: lora, smaller images, or a GPU with more memory"
            )
        self.rows_per_forward = largest // 2
        self.on_fewer_rows(self.rows_per_forward, error)

    def take_step(self) -> float | None:
        """Clip the gradients, take an optimiser step with them, and clear them. Keep the old policy before.

        Returns the norm of the gradients before clipping. None: a gradient is not finite, so no step was taken.
        """
        parameters = self.parameters.values()
        norm = float(whole_of(torch.nn.utils.clip_grad_norm_(parameters, self.config.gradient_clip)))
        if math.isfinite(norm):
            # Give every parameter a gradient: the step must not depend on the groups that happened to have variance.
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.old.keep()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm if math.isfinite(norm) else None

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return AdamW's moments by parameter name. Empty before the first step."""
        state = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{name}|{key}"] = value
        return state

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """Restore the exact state returned by `optimizer_state`. Takes over tensors that are on the right device."""
        self.optimizer.state.clear()
        for full_name, value in state.items():
            name, key = full_name.rsplit("|", 1)
            parameter = self.parameters[name]
            # Fused AdamW keeps its step count beside the moments, on a GPU too.
            self.optimizer.state[parameter][key] = value.to(parameter.device)

    def fill_moment(self, name: str, value: Tensor, fill: Callable[[Tensor, Tensor], None]) -> None:
        """Restore one tensor of `optimizer_state` with `fill(target, value)`. The target may be divided over ranks."""
        name, key = name.rsplit("|", 1)
        parameter = self.parameters[name]
        state = self.optimizer.state[parameter]
        if key not in state:
            empty = torch.zeros_like(parameter.detach())
            state[key] = empty if value.shape == empty.shape else torch.zeros_like(value, device=empty.device)
        fill(state[key], value)


class Transaction:
    """The update of a mini-batch. Single use. See the module docstring."""

    def __init__(
        self,
        trainer: Trainer,
        manifest: Manifest,
        minibatch: int,
        plan: Plan,
        std: float | None,
        share: Sequence[int] | None = None,
    ) -> None:
        self._trainer = trainer
        self._manifest = manifest
        self._plan = plan
        self._std = std
        self._step = manifest.minibatches[minibatch]
        self._wanted = self._step if share is None else tuple(share)
        images = sum(len(manifest.groups[number].seeds) for number in self._step)
        rows_per_image = trainer.objective.rows_per_image(plan)
        self.planned_rows = images * rows_per_image
        self._rows_of_largest_group = rows_per_image * max(len(manifest.groups[number].seeds) for number in self._step)
        self._groups: dict[int, FinishedGroup] = {}
        """All groups added, in the order of arrival. Kept until the end, to start again after a memory error."""
        self._taken: set[int] = set()
        self._start()

    def _start(self) -> None:
        """Begin the step without gradients. Groups added before count as waiting."""
        self._taken.clear()
        rows_per_forward = self._trainer.rows_per_forward
        self.groups_of_unit = max(1, rows_per_forward // max(1, self._rows_of_largest_group))
        if self._manifest.unit:
            self.groups_of_unit = math.ceil(self._manifest.unit * len(self._wanted) / len(self._step))
        self.health = Health(neutral=self._trainer.objective.neutral, rows_per_forward=rows_per_forward)
        self._sum = self._gradient_sum()
        self._trainer.optimizer.zero_grad(set_to_none=True)

    def _gradient_sum(self) -> GradientSum | None:
        """Return the sum of `order: exact`. Each group is an addend at most."""
        if self._trainer.config.order != "exact":
            return None
        return GradientSum(list(self._trainer.parameters.values()), most=len(self._wanted))

    @property
    def missing(self) -> list[int]:
        """Return the group numbers not added yet."""
        return [number for number in self._wanted if number not in self._groups]

    def add(self, number: int, group: FinishedGroup) -> None:
        """Add a group's gradient. Raises ValueError for a group outside this step or added before.

        Raises DoesNotFit if a pass of one row runs out of memory.
        """
        if number not in self._wanted or number in self._groups:
            raise ValueError(f"group {number} of batch {self._manifest.batch} is not wanted: missing {self.missing}")
        self._groups[number] = group
        if self._trainer.rows_per_forward != self.health.rows_per_forward:
            self._start()  # beside the step, log-probs that the trainer computed again did not fit
        while True:
            try:
                self._train_ready()
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                text = first_line(error)
            self._trainer.halve(min(self.planned_rows, self.groups_of_unit * self._rows_of_largest_group), text)
            self._start()

    def _train_ready(self) -> None:
        """Train the groups that may be trained now: whole bundles, and at the end of the step the rest."""
        for bundle in list(self._bundles()):
            begun = time.perf_counter()
            self._accumulate({number: self._groups[number] for number in bundle})
            least = self._least_seconds(self._rows_of_largest_group * len(bundle))
            time.sleep(max(0.0, begun + least - time.perf_counter()))
            self._taken.update(bundle)
        if self._sum is not None and not self.missing:
            self._sum.write()

    def _least_seconds(self, rows: int) -> float:
        """Return the configured time of a unit: of its rows, and of its passes."""
        trainer = self._trainer
        return rows * trainer.row_seconds + math.ceil(rows / trainer.rows_per_forward) * trainer.pass_seconds

    def _bundles(self) -> Iterator[Sequence[int]]:
        """Yield the bundles that may be trained now.

        With `order: exact` a bundle is a fixed slice of the step's groups, so its gradient has the same bits whichever
        groups came first.
        """
        size = self.groups_of_unit
        if self._sum is not None:
            units = (self._wanted[first : first + size] for first in range(0, len(self._wanted), size))
            yield from (unit for unit in units if self._taken.isdisjoint(unit) and self._groups.keys() >= set(unit))
            return
        if self._trainer.config.order == "arrival":
            ready = [number for number in self._groups if number not in self._taken]
        else:
            behind = [number for number in self._wanted if number not in self._taken]
            ready = list(itertools.takewhile(lambda number: number in self._groups, behind))
        last = not self.missing
        for first in range(0, len(ready), size):
            bundle = ready[first : first + size]
            if len(bundle) == size or last:
                yield bundle

    def commit(self) -> Health:
        """Take the optimiser step. Raises ValueError while groups are missing.

        A non-finite gradient takes no step: all groups of the step count as skipped.
        """
        if self.missing:
            raise ValueError(f"groups {self.missing} of batch {self._manifest.batch} have not been added")
        norm = self._trainer.take_step()
        if norm is None:
            self.health.skipped = list(self._step)
        else:
            self.health.gradient_norm = norm
        return self.health

    def abort(self) -> None:
        """Discard all gradients. Weights and optimiser are unchanged."""
        self._groups.clear()
        self._sum = self._gradient_sum()
        self._trainer.optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, groups: Mapping[int, FinishedGroup]) -> None:
        """Add the gradients of some groups: together if all losses are finite, otherwise group by group."""
        rows_of_groups = (self.rows_of(number, group) for number, group in groups.items())
        together = [group_rows for group_rows in rows_of_groups if group_rows is not None]
        if together and not self._backward(together):
            for alone in together:
                if len(together) == 1 or not self._backward([alone]):
                    self.health.skipped.append(alone.number)

    def rows_of(self, number: int, group: FinishedGroup) -> "GroupRows | None":
        """Return a group as training rows, or None if the group adds nothing."""
        self.health.groups += 1
        if not all(math.isfinite(reward) for reward in group.rewards):
            self.health.skipped.append(number)
            return None
        config, objective = self._trainer.config, self._trainer.objective
        rewards = torch.tensor([group.rewards], dtype=torch.float32)
        advantages = group_advantages(
            rewards, config.std, scale=self._std, clip=config.advantage_clip, correction=config.std_correction
        )[0]
        if not advantages.any():
            self.health.without_variance += 1
            if not objective.trains_equal_rewards:
                return None
        tensors = objective.rows(group, advantages, self._plan)
        return GroupRows(number=number, prompt=group.prompt, is_early=group.is_early, tensors=tensors)

    def _backward(self, groups: Sequence["GroupRows"]) -> bool:
        """Backpropagate the rows of some groups. If a loss is not finite, add nothing and return False."""
        trainer, objective, device = self._trainer, self._trainer.objective, self._trainer.device
        parameters = list(trainer.parameters.values())
        encoded = trainer.adapter.encode([group.prompt for group in groups])
        whose = torch.tensor([place for place, group in enumerate(groups) for _ in range(len(group))])
        tensors = {name: torch.cat([group.tensors[name] for group in groups]) for name in groups[0].tensors}
        # Use our own buffers. Autograd's gradients may be shared by two parameters, or have another memory layout than
        # the parameter. Clipping and fused AdamW work in place and in memory order, and check neither.
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        summed_health = Health(neutral=objective.neutral)
        for some in torch.arange(len(whose)).split(trainer.rows_per_forward):
            # Only the rows of one pass lie on the device.
            moved = {name: value.to(device) for name, value in rows(tensors, some).items()}
            batch = Rows(conditioning=rows(encoded, whose[some].to(device)), tensors=moved)
            if any(group.is_early for group in groups):
                early = torch.tensor([group.is_early for group in groups])[whose[some]]
                batch = batch.with_tensors({EARLY: early.to(device)})
            with torch.no_grad():
                batch = batch.with_tensors(objective.constants(trainer.adapter, self._plan, batch))
            for result in self._side_by_side(batch):
                if result is None:
                    return False
                more, health = result
                added(gradients, more)
                summed_health.add(health)
        if self._sum is not None:
            self._sum.add(gradients)
            self.health.add(summed_health)
            return True
        later: list[tuple[Tensor, Tensor]] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                later.append((parameter.grad, gradient))
        added([total for total, _ in later], [part for _, part in later])
        self.health.add(summed_health)
        return True

    def _side_by_side(self, batch: Rows) -> list[tuple[Sequence[Tensor | None], Health] | None]:
        """Return the gradients of a batch. On a CPU, compute parts of the batch at once, each in a thread.

        Two threads with half the rows each take a sixth less time than a single pass that divides every operation
        between two threads and waits for both. The sum runs over the parts in order, whichever part is ready first.
        """
        threads = torch.get_num_threads() if next(iter(batch.tensors.values())).device.type == "cpu" else 1
        parts = min(threads, max(1, len(batch) // LEAST_ROWS_OF_A_THREAD))
        if parts == 1:
            return [self._gradient(batch)]

        def gradient_of_part(some: Tensor) -> tuple[Sequence[Tensor | None], Health] | None:
            torch.set_num_threads(threads // parts)  # limit of this thread
            return self._gradient(batch.at(some))

        with ThreadPoolExecutor(parts) as pool:
            return list(pool.map(gradient_of_part, torch.arange(len(batch)).chunk(parts)))

    def _gradient(self, batch: Rows) -> tuple[Sequence[Tensor | None], Health] | None:
        """Return a gradient for every parameter, or None in the place of an unused parameter.

        If the loss is not finite, return None instead of the gradients.
        """
        trainer = self._trainer
        losses = trainer.objective.losses(trainer.adapter, self._plan, batch)
        health = figures_of(trainer.objective, batch, losses)
        total = losses.loss.sum() / self.planned_rows
        if not is_finite(total, health):
            return None
        return torch.autograd.grad(total, list(trainer.parameters.values()), allow_unused=True), health


def added(sums: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to their sums in place, in a few kernels. None: nothing to add."""
    pairs = [(total, part) for total, part in zip(sums, gradients, strict=True) if part is not None]
    if pairs:
        torch._foreach_add_([total for total, _ in pairs], [part for _, part in pairs])


@dataclass(frozen=True, kw_only=True)
class GroupRows:
    """A group as training rows, on the CPU: the tensors of `Objective.rows`."""

    number: int
    prompt: str
    is_early: bool
    tensors: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))
