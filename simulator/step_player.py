"""One step on simpy: pipeline ranks run their ops, their traffic runs beside them, and links are shared.

Every traffic has a time that it takes alone and a part of it that is exposed; it starts early by the rest, beside the
compute that hides it. So a step whose traffic shares nothing takes what the closed form says, and traffic that takes
longer is waited for longer. Gradients go bucket by bucket; the optimizer waits for all ranks, because the gradient norm
spans them; what of the weights the next forward hides runs beside the first ops of the step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import simpy

from simulator.longest_path import OpGraph
from simulator.op_times import OpTimes, gradient_anchors, op_kind, op_label
from simulator.step_moves import Moves, mark
from simulator.step_problem import StepProblem
from simulator.step_records import LATE, Activity, Background, EndCosts, OpTraffic, Played


def play_streams(
    graph: OpGraph,
    times: Sequence[OpTimes],
    ends: EndCosts,
    traffic: OpTraffic | None = None,
    problem: StepProblem | None = None,
    *,
    together: bool = True,
    sharing: bool = True,
    background: Sequence[Background] = (),
) -> Played:
    """Play a step.

    Args:
        graph: ops and what each waits for, the same for all units.
        times: of the ops of each class of units, in the order of the problem's classes.
        ends: gradients, optimizer, weights.
        traffic: of ops; None: all traffic takes what it takes alone.
        problem: its streams on links.
        together: no rank updates before the last has its gradients; False: each by itself.
        sharing: False: each stream has its links to itself.
        background: see there.
    """
    return _Step(graph, times, ends, traffic or OpTraffic(), problem, together, sharing, background).run()


class _Step:
    def __init__(
        self,
        graph: OpGraph,
        times: Sequence[OpTimes],
        ends: EndCosts,
        traffic: OpTraffic,
        problem: StepProblem | None,
        together: bool,
        sharing: bool,
        background: Sequence[Background],
    ) -> None:
        self.graph, self.times, self.ends, self.traffic, self.problem = graph, times, ends, traffic, problem
        self.together = together
        self.environment = simpy.Environment()
        self.moves = Moves(self.environment, problem, background, sharing)
        self.log: list[Activity] = []
        self.ranks = sorted(set(graph.ranks))
        self.mine = {rank: [i for i, one in enumerate(graph.ranks) if one == rank] for rank in self.ranks}
        self.receiver = {
            j: graph.ranks[i]
            for i in range(len(graph.ops))
            for j in graph.inputs[i]
            if graph.ranks[j] != graph.ranks[i]
        }
        self.arrived = [[self.environment.event() for _ in graph.ops] for _ in times]
        self.delivered = [[-1] * len(graph.ops) for _ in times]
        self.started: dict[tuple[int, int], simpy.Event] = {}
        reduce = ends.reduce_seconds, ends.reduce_exposed_seconds
        self.anchors = [gradient_anchors(graph, one, *reduce) for one in times] if ends.reduce_seconds > 0 else []
        for number, anchors in enumerate(self.anchors):
            for anchor in anchors.values():
                if anchor.op >= 0:
                    self.started[number, anchor.op] = self.environment.event()

    def note(self, activity: Activity) -> int:
        """Write an activity down."""
        self.log.append(activity)
        return len(self.log) - 1

    # ---- ops

    def pipeline_rank(self, number: int, rank: int) -> Generator[simpy.Event, Any, int]:
        """Run the ops of a rank; returns its last activity."""
        environment, graph, last = self.environment, self.graph, -1
        for i in self.mine[rank]:
            cause = last
            for j in graph.inputs[i]:
                if graph.ranks[j] != rank:
                    if not self.arrived[number][j].processed:
                        yield self.arrived[number][j]
                    came = self.delivered[number][j]
                    if cause < 0 or self.log[came].end_seconds > self.log[cause].end_seconds:
                        cause = came
            if (number, i) in self.started:
                self.started[number, i].succeed(len(self.log))
            at = self.note(
                Activity(op_kind(graph, i), op_label(graph.ops[i]), rank, number, environment.now, 0.0, cause, i)
            )
            last = yield from self.op(number, rank, i, at)
            self.delivered[number][i] = last
            self.arrived[number][i].succeed()
        return last

    def op(self, number: int, rank: int, i: int, at: int) -> Generator[simpy.Event, Any, int]:
        """One op: compute with the traffic inside it, then what the sender waits for of sending its result."""
        environment, times, start = self.environment, self.times[number], self.environment.now
        core, send = times.work[i] + times.gather[i] + times.host[i], times.send[i]
        inner = self._inner(number, rank, i, start + core)
        hop, whole = self._hop(number, rank, i, start + core + send)
        receiver = f"send {op_label(self.graph.ops[i])} to rank {self.receiver.get(i, rank)}"
        if not inner and hop < 0:
            yield environment.timeout(times.busy(i))
            self.log[at] = self.log[at]._replace(end_seconds=start + core if send else environment.now)
            if send == 0:
                return at
            return self.note(Activity("p2p", receiver, rank, number, start + core, environment.now, at, i))
        done: dict[int, float] = {}
        waiting: list[tuple[simpy.Event, int, float]] = []
        begins = [(core - seconds, stream, seconds) for stream, seconds in inner]
        begins += [(max(core + send - whole, 0.0), hop, whole)] if hop >= 0 else []
        passed, sending = 0.0, None
        for begin, stream, seconds in sorted(begins):
            if begin > passed:
                yield environment.timeout(begin - passed)
                passed = begin
            event = self.moves.move(stream, seconds)
            mark(event, stream, done, environment)
            if stream == hop:
                sending = event
            else:
                waiting.append((event, stream, seconds))
        if core > passed:
            yield environment.timeout(core - passed)
        self.log[at] = self.log[at]._replace(end_seconds=environment.now)
        at = yield from self._late(number, rank, i, at, start + core, waiting, done)
        if sending is None:
            if send > 0:
                yield environment.timeout(send)
            else:
                return at
        else:
            began = environment.now
            yield environment.all_of([sending, environment.timeout(send)])
            if environment.now - began <= LATE * max(send, 1e-3) and send == 0:
                return at
        return self.note(
            Activity("p2p", receiver, rank, number, self.log[at].end_seconds, environment.now, at, i, hop, whole)
        )

    def _late(
        self,
        number: int,
        rank: int,
        i: int,
        at: int,
        due: float,
        waiting: list[tuple[simpy.Event, int, float]],
        done: dict[int, float],
    ) -> Generator[simpy.Event, Any, int]:
        """Wait for traffic inside an op that is late; kinds follow each other, so their delays add."""
        if waiting:
            yield self.environment.all_of([event for event, _, _ in waiting])
        late = {stream: done[stream] - due for _, stream, _ in waiting}
        held = sum(one for one in late.values() if one > 0)
        longest = max(late.values(), default=0.0)
        if held > longest:
            yield self.environment.timeout(held - longest)
        if longest <= LATE * max(due, 1e-3):
            return at
        stream = max(late, key=lambda one: late[one])
        assert self.problem is not None
        seconds = next(seconds for _, one, seconds in waiting if one == stream)
        kind = self.problem.streams[stream].kind
        name = f"{kind.removesuffix('_comm').upper()} of {op_label(self.graph.ops[i])}"
        drawn = "dp_comm" if kind == "fsdp" else kind
        return self.note(Activity(drawn, name, rank, number, due, self.environment.now, at, i, stream, seconds))

    def _inner(self, number: int, rank: int, i: int, end: float) -> list[tuple[int, float]]:
        """Streams inside an op that may be late, with the seconds of each, alone; all are due at its end."""
        if self.problem is None:
            return []
        times, traffic = self.times[number], self.traffic
        found = [
            (self.moves.stream(kind, number, rank), share * times.work[i])
            for kind, share in (traffic.inner_share.items() if self.graph.ops[i].kind != "W" else ())
        ]
        if traffic.fsdp_seconds:
            seconds = min(traffic.fsdp_seconds[i], times.work[i] + times.gather[i])
            found.append((self.moves.stream("fsdp", number, rank), seconds))
        found = [(stream, seconds) for stream, seconds in found if stream >= 0 and seconds > 0]
        return [(stream, seconds) for stream, seconds in found if not self.moves.in_time(stream, seconds, end)]

    def _hop(self, number: int, rank: int, i: int, end: float) -> tuple[int, float]:
        """The stream that sends the result of an op and may be late (-1: none), and its seconds, alone."""
        if i not in self.receiver or self.problem is None or self.traffic.p2p_seconds <= 0:
            return -1, 0.0
        times = self.times[number]
        room = times.work[i] + times.gather[i] + times.host[i] + times.send[i]
        stream, seconds = self.moves.stream("p2p", number, rank, self.receiver[i]), min(self.traffic.p2p_seconds, room)
        return (-1, 0.0) if stream < 0 or self.moves.in_time(stream, seconds, end) else (stream, seconds)

    # ---- the end of a step

    def gradients(self, rank: int) -> Generator[simpy.Event, Any, int]:
        """Reduce the gradients of a rank, a bucket for each of its chunks, once all units have them."""
        environment = self.environment
        ready = [environment.process(self._ready(number, rank)) for number in range(len(self.times))]
        came: dict[int, float] = {}
        for number, event in enumerate(ready):
            mark(event, number, came, environment)
        yield environment.all_of(ready)
        cause = _number(ready[max(came, key=lambda one: came[one])])
        chunks = sorted({self.graph.ops[i].stage for i in self.mine[rank]}, reverse=True)
        alone = min(anchors[rank].seconds for anchors in self.anchors) / len(chunks)
        for chunk in chunks:
            start = environment.now
            slowest = yield from self.moves.together("reduce", rank, alone)
            cause = self.note(
                Activity(
                    "dp_comm",
                    f"gradients of stage {chunk}",
                    rank,
                    -1,
                    start,
                    environment.now,
                    cause,
                    -1,
                    slowest,
                    alone,
                )
            )
        return cause

    def _ready(self, number: int, rank: int) -> Generator[simpy.Event, Any, int]:
        anchor, at = self.anchors[number][rank], -1
        if anchor.op >= 0:
            at = yield self.started[number, anchor.op]
        yield self.environment.timeout(anchor.after_seconds)
        return at

    def weights(self, seconds: float, cause: int) -> Generator[simpy.Event, Any, int]:
        """Gather updated weights on all ranks; returns the last activity."""
        environment, start = self.environment, self.environment.now
        runs = {rank: environment.process(self.moves.together("gather", rank, seconds)) for rank in self.ranks}
        ended: dict[int, float] = {}
        for rank, run in runs.items():
            mark(run, rank, ended, environment)
        yield environment.all_of(list(runs.values()))
        if cause == HIDDEN:
            return cause
        last = cause
        for rank, run in runs.items():
            one = self.note(
                Activity("dp_comm", "updated weights", rank, -1, start, ended[rank], cause, -1, _number(run), seconds)
            )
            if last == cause or ended[rank] > self.log[last].end_seconds:
                last = one
        return last

    def whole(self) -> Generator[simpy.Event, Any, int]:
        """The step."""
        environment, ends = self.environment, self.ends
        before = ends.gather_seconds - ends.gather_exposed_seconds
        if before > 0 and self.problem is not None:
            environment.process(self.weights(before, HIDDEN))
        running: dict[int, list[simpy.Process]] = {
            rank: [environment.process(self.pipeline_rank(number, rank)) for number in range(len(self.times))]
            for rank in self.ranks
        }
        if ends.reduce_seconds > 0:
            for rank in self.ranks:
                running[rank].append(environment.process(self.gradients(rank)))
        if not self.together:
            own = [environment.process(self.own_end(rank, running[rank])) for rank in self.ranks]
            yield environment.all_of(own)
            return max((_number(run) for run in own), key=lambda one: self.log[one].end_seconds - self.begin(one))
        last = yield from self.last_of([run for runs in running.values() for run in runs])
        last = yield from self.update(-1, last)
        if ends.gather_exposed_seconds > 0:
            last = yield from self.weights(ends.gather_exposed_seconds, last)
        return last

    def last_of(self, running: list[simpy.Process]) -> Generator[simpy.Event, Any, int]:
        """Wait for processes; returns the activity that ended last."""
        yield self.environment.all_of(running)
        return max((_number(run) for run in running), key=lambda one: self.log[one].end_seconds)

    def update(self, rank: int, cause: int) -> Generator[simpy.Event, Any, int]:
        """Run the optimizer on a rank (-1: on all of them)."""
        start = self.environment.now
        if self.ends.optimizer_seconds <= 0:
            return cause
        yield self.environment.timeout(self.ends.optimizer_seconds)
        return self.note(Activity("optimizer", "optimizer", rank, -1, start, self.environment.now, cause))

    def own_end(self, rank: int, running: list[simpy.Process]) -> Generator[simpy.Event, Any, int]:
        """A rank that updates without waiting for the others."""
        last = yield from self.last_of(running)
        last = yield from self.update(rank, last)
        if self.ends.gather_exposed_seconds > 0:
            start = self.environment.now
            seconds = self.ends.gather_exposed_seconds
            slowest = yield from self.moves.together("gather", rank, seconds)
            named = "dp_comm", "updated weights", rank, -1, start, self.environment.now, last, -1, slowest, seconds
            last = self.note(Activity(*named))
        return last

    def begin(self, last: int) -> float:
        """When the step of the rank of an activity began: with its first op, where ranks go on by themselves."""
        rank = self.log[last].rank
        if self.together or rank < 0:
            return 0.0
        return min(one.start_seconds for one in self.log if one.rank == rank and one.op >= 0)

    def run(self) -> Played:
        """Play."""
        last = self.environment.run(until=self.environment.process(self.whole()))
        record = self.moves.engine.record
        assert isinstance(last, int) and record is not None
        begin = self.begin(last)
        return Played(
            activities=tuple(self.log),
            step_seconds=self.log[last].end_seconds - begin if self.log else float(self.environment.now),
            begin_seconds=begin,
            end_seconds=float(self.environment.now),
            last=last,
            moved=tuple(self.moves.moved),
            record=record,
            counters=self.moves.engine.counters,
            rounds=self.moves.rounds,
        )


HIDDEN = -2
"""Stands for the activity before the step, of which only its traffic is seen."""


def _number(event: simpy.Event) -> int:
    """The activity that a process returned."""
    value = event.value
    assert isinstance(value, int)
    return value
