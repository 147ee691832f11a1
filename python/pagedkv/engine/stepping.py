"""A step up to what it decides: drafts, schedule, one forward, and the next token of each sample that is computed."""

from __future__ import annotations

import time

from torch import Tensor

from ..errors import InvalidArgumentError
from ..hf.identity import Identity
from ..transfers import to_device
from .batch import Batch
from .requests import Request, Sample
from .runner import Runner
from .sampling import Decision, describe, draw, failure
from .scheduler import Scheduler


class Stepper:
    """Computes what the scheduler grants. What comes out are decisions; no sample has a new token yet.

    Attributes:
        num_steps, forward_seconds: of all forwards so far.
        fresh: requests that no forward has computed tokens of.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, requests: dict[int, Request]) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.manager = scheduler.manager
        self._requests = requests
        self._watch = runner.patch.watch
        self._watch.learn()
        self.fresh: list[Request] = []
        self._common: Identity | None = None
        self._frozen = self._watch.inspect() if runner.is_frozen else None
        self.num_steps = 0
        self.forward_seconds = 0.0

    def decide(self) -> list[Decision]:
        """One step. Calls logits processors and stopping criteria; what they raise ends their request alone."""
        scheduler = self.scheduler
        drafting = [seq for seq in scheduler.running if seq.has_drafts and seq.is_pending]
        failed = [decision for seq in drafting if (decision := self._draft(seq)) is not None]
        batch = scheduler.schedule()
        if batch is None:
            stuck = scheduler.waiting[0].request.samples if scheduler.waiting else []
            text = "its blocks could not be granted in an empty pool"
            return [failure(seq, text) for seq in stuck]
        self.runner.pool.apply_moves()
        start = time.monotonic()
        logits = self.runner.run(batch)
        self.forward_seconds += time.monotonic() - start
        changed = self._changed()
        if changed is not None:
            return changed
        self._commit(batch.num_new is None)
        self.num_steps += 1
        return failed + self._sample(batch, logits, {decision.sample for decision in failed})

    def identity(self) -> Identity:
        """Of the model, under which requests are added.

        Raises:
            InvalidArgumentError: it is not the one that was compiled or captured.
        """
        now = self.runner.patch.follow_model(self.runner.model)
        if self._frozen is not None and (changes := self._frozen.changes(now, self.runner.not_frozen)):
            raise InvalidArgumentError(
                f"model: expected what was compiled or captured, got a changed one ({changes}); make a new Engine"
            )
        return now

    def _changed(self) -> list[Decision] | None:
        """What becomes of requests that were added under another identity than the forward's; None: there are none, and
        what it has computed holds."""
        # what only an inspection sees is looked for once, when a request begins
        begun = [request for request in self.fresh if any(s.row >= 0 and s.work for s in request.samples)]
        now = self._watch.inspect() if begun else self._watch.look()
        if now is self._common and not self.fresh:
            return None
        decisions, is_void = [], False
        for request in self._requests.values():
            if request.identity is now or request.identity is None:
                continue
            # hooks are no part of what was asked for, but nobody shall share what is computed under them
            changes = request.identity.changes(now, () if self._frozen else ("hooks",))
            if changes:
                text = f"the model changed after the request was added: {changes}"
                decisions += [failure(seq, text) for seq in request.samples]
            elif now.keys is None and not request.is_private:
                self.scheduler.make_private(request)
            else:
                continue
            is_void = True
        if is_void:
            self.scheduler.reset([seq for request in self._requests.values() for seq in request.scheduled()])
            return decisions
        self.fresh = [request for request in self.fresh if request.id in self._requests and request not in begun]
        if all(request.identity is now for request in self._requests.values()):
            self._common = now
        return None

    def _draft(self, seq: Sample) -> Decision | None:
        """Give a sample its draft; a decision where that fails."""
        try:
            seq.draft = seq.settings.draft(seq.tokens)
        except Exception as error:  # of this request alone
            return failure(seq, describe(error))
        return None

    def _commit(self, is_decode: bool) -> None:
        running = self.scheduler.running
        if is_decode:
            self.manager.commit_step([seq.seq_id for seq in running])
        for seq in running:
            if not is_decode and seq.work:
                self.manager.commit(seq.seq_id, seq.work)
            seq.num_computed += seq.work

    def _sample(self, batch: Batch, logits: Tensor, failed: set[Sample]) -> list[Decision]:
        """The next tokens of each sample whose tokens are all computed."""
        if batch.is_decode and not failed:
            decisions = [Decision(seq, len(seq.tokens)) for seq, _ in batch.ready]
            self._draw(decisions, logits)
            return decisions
        plain, rows, drafted = [], [], []
        for seq, row in batch.ready:
            if seq in failed:
                continue
            if seq.draft:
                drafted.append(self._verify(seq, logits[row : row + 1 + len(seq.draft)]))
                continue
            for each in (seq, *self._fork(seq)) if seq.num_forks else (seq,):
                plain.append(Decision(each, len(each.tokens)))
                rows.append(row)
        if plain:
            is_all = rows == list(range(len(logits)))
            self._draw(plain, logits if is_all else logits[to_device(rows, logits.device)])
        return plain + drafted

    def _fork(self, seq: Sample) -> list[Sample]:
        """The other samples of a request whose prompt is computed now."""
        children = [child for child in seq.request.samples[1:] if child.finish_reason is None]
        for child in children:
            self.scheduler.fork(seq, child)
        seq.num_forks = 0
        return children

    def _verify(self, seq: Sample, logits: Tensor) -> Decision:
        """Sample token after token as long as the draft is confirmed: what plain decoding would have sampled."""
        decision = Decision(seq, len(seq.tokens))
        decision.num_drafted = len(seq.draft)
        for position, expected in enumerate([*seq.draft, None]):
            self._draw([decision], logits[position : position + 1])
            if decision.reason is not None or decision.tokens[-1] != expected:
                break
            decision.num_accepted += 1
        return decision

    def _draw(self, decisions: list[Decision], logits: Tensor) -> None:
        for decision in draw(decisions, logits):
            if decision.sample.seq_id in self.manager.sequences:
                # what the model computed from NaN may lie in published blocks
                for blocks in self.manager.block_ids(decision.sample.seq_id):
                    self.manager.pool.evict([block for block in blocks if block])

    def confirm(self, drafted: list[Decision]) -> None:
        """Tell the manager of accepted drafts, whose keys the forward has written, once they are recorded."""
        for decision in drafted:
            seq, count = decision.sample, decision.num_accepted
            seq.draft = []
            if count and seq.row >= 0 and len(seq.tokens) > decision.start:  # not aborted by a callback
                self.manager.append(seq.seq_id, seq.tokens[decision.start : decision.start + count])
                self.manager.commit(seq.seq_id, count)
                seq.num_computed += count
