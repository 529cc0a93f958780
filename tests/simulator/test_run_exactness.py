"""Whole runs against an independent loop in which every save, stall and drain is an event of its own."""

import heapq
import math
from itertools import islice

import numpy as np
import pytest

from scenarios.faults import Elastic, Failure, Faults, Lemons, Maintenance, Manual, Stragglers
from simulator.failures import FailureEvent, failure_events, generator, rate_factor
from simulator.run import simulate_run
from simulator.run_setup import RunSetup
from simulator.tiers import FILE_SYSTEM, SURVIVES, SaveTier

DAY = 86400.0


class Tier:
    """Complete saves as a plain list, newest last; one off the regular places until the next regular one."""

    def __init__(self, spec):
        self.spec, self.saves, self.special, self.draining = spec, [0.0], None, []

    def complete(self, now):
        for ready, position in sorted(self.draining):
            if ready <= now:
                self.special = None
                self.saves = [*self.saves, position][-self.spec.keep :]
        self.draining = [one for one in self.draining if one[0] > now]

    def held(self):
        return self.saves + ([self.special] if self.special is not None else [])

    def lose(self):
        self.saves, self.special, self.draining = [], None, []

    def back_to(self, position):
        self.saves = [one for one in self.saves if one <= position]
        if self.special is not None and self.special > position:
            self.special = None
        self.draining = []


def loop(setup, seed):
    """The same run, one happening at a time; returns wall seconds, useful seconds and rework."""
    faults, found, tau = setup.faults, setup.sources, setup.interval_seconds
    factor = rate_factor(faults.rate_spread, seed, 0)
    events = list(islice(failure_events(found, seed, 0, factor=factor), 6000))
    tiers = [Tier(spec) for spec in setup.tiers]
    replicas = setup.num_nodes / setup.replica_nodes
    now, position, state, then = 0.0, 0.0, "run", math.inf
    stall, saving = 0.0, False
    spares = math.inf if faults.spares is None else faults.spares
    warm, need, missing, whole, load, later = faults.standbys, 0, 0, False, 0.0, (0.0, 0.0)
    repairs, crews, rework, index, number = [], [], 0.0, 0, 0
    broken, planted, hidden, queue, operated = [], [], [], [], 0.0
    relapses, picks = generator("recurrences", seed, 0), generator("repairs", seed, 0).random
    others, elsewhere = [], generator("other jobs", seed, 0)
    for nodes in faults.spares_shared_with:
        losses = sum(one.rate_per_second * one.lost_nodes for one in found if math.isfinite(one.repair_seconds))
        others.append([elsewhere.exponential(setup.num_nodes / (factor * nodes * losses)), 0.0])
        others[-1][1] = setup.num_nodes / (factor * nodes * losses)
    lemons = left = round(faults.lemons.share * setup.num_nodes) if faults.lemons else 0
    slow, ends, luck = {}, [], generator("stragglers", seed, 0)
    next_slow, gap, count = math.inf, 0.0, 0
    if faults.stragglers:
        gap = 1 / (faults.stragglers.rate_per_second * setup.num_nodes * factor)
        next_slow = luck.exponential(gap)
    next_stop = faults.maintenance.every_seconds / 2 if faults.maintenance else math.inf
    work = setup.num_steps / setup.interval_steps
    target, horizon = work, setup.horizon_seconds

    def live(broken):
        if broken <= 0 or not faults.elastic:
            return 1.0
        idle = math.ceil(broken / setup.replica_nodes)
        if not faults.elastic.gather:
            idle = round(replicas * (1 - (1 - 1 / replicas) ** broken)) if replicas > 1 else min(broken, 1)
        return max(0.0, replicas - idle) / replicas

    def speed():
        return live(missing) * min(slow.values(), default=1.0) * math.prod(setup.slow.values())

    def repair(nodes, seconds, wrong=None):
        nonlocal number
        number += 1
        if faults.repair_crews is None:
            heapq.heappush(repairs, (now + seconds, number, nodes, wrong))
            return
        for _ in range(nodes):
            free = crews.pop(crews.index(min(crews))) if len(crews) >= faults.repair_crews else now
            crews.append(max(now, free) + seconds)
            number += 1
            heapq.heappush(repairs, (max(now, free) + seconds, number, 1, wrong))
            wrong = None

    def choose(nodes, idle):
        """Which of the idle nodes that are taken are still broken."""
        for place in range(nodes if broken else 0):
            if picks() * (idle - place) < len(broken):
                yield broken.pop(int(picks() * len(broken)))

    def serve():
        nonlocal spares
        while queue and queue[0] != "own" and spares >= 1:
            queue.pop(0)
            list(choose(1, spares))
            spares -= 1

    def get_nodes():
        nonlocal warm, spares, need, missing, state, then
        restart = sum(faults.phases_seconds.values())
        idle = warm + spares
        if need <= idle:
            planted.extend(choose(need, idle))
        elif faults.elastic and live(missing + need - idle) > 0:
            planted.extend(choose(int(idle), idle))
        if need <= warm:
            warm -= need
            again = faults.standby_restart_seconds
        elif need <= warm + spares:
            spares -= need - warm
            warm, again = 0, restart
        elif faults.elastic and live(missing + need - warm - spares) > 0:
            missing += need - warm - spares
            warm = spares = 0
            again = faults.elastic.reconfigure_seconds
        else:
            state, then = "wait", math.inf
            if "own" not in queue:
                queue.append("own")
            return
        if "own" in queue:
            queue.remove("own")
            serve()
        if faults.elastic and faults.elastic.keeps_state:
            again = faults.elastic.reconfigure_seconds
        elif need == 0:
            again = restart if whole or faults.in_job_restart_seconds is None else faults.in_job_restart_seconds
        need = 0
        state, then = "restart", now + again + load

    def stop(seconds, how, nodes=0):
        nonlocal state, then, load, stall, saving, need, whole
        for tier in tiers:
            tier.complete(now)
            tier.draining, tier.special = [], position
        load, stall, saving, whole = 0.0, 0.0, False, True
        need += nodes
        if nodes:
            get_nodes()
        else:
            state, then = how, now + seconds

    def newest(kind, limit):
        fit = [(one, -tier.spec.load_seconds) for tier in tiers if kind in tier.spec.survives
               for one in tier.held() if one <= limit]  # fmt: skip
        best = max(fit, default=(0.0, 0.0))
        return best[0], -best[1]

    while True:
        while planted and state == "run":
            hidden.append((operated + relapses.exponential(faults.recurs_seconds), planted.pop(0)))
        following = min(math.floor(position + 1e-9) + 1, target)
        if state != "run":
            own = math.inf
        elif saving:
            own = now + stall
        else:
            own = now + max(0.0, following - position) * tau / speed()
        moments = [
            horizon, events[index].time_seconds, repairs[0][0] if repairs else math.inf, next_stop, then, own,
            next_slow, min(ends)[0] if ends else math.inf,
            now + min(hidden)[0] - operated if hidden and state == "run" else math.inf,
            min((one[0] for one in others), default=math.inf),
        ]  # fmt: skip
        what = min(range(10), key=moments.__getitem__)
        passed = moments[what] - now
        if state == "run":
            operated += passed
            if saving:
                stall = max(0.0, stall - passed)
            else:
                position = min(following, position + speed() * passed / tau)
        now = moments[what]
        for tier in tiers:
            if state == "run":
                tier.complete(now)
        if what == 0:
            return now, position * tau, rework
        if what in (1, 8):
            event = events[index]
            if what == 8:
                again = min(hidden)[1]
                hidden.remove(min(hidden))
                event = FailureEvent(now, again, *relapses.random(5), found[again].lost_nodes)
            index += what == 1
            source = found[event.source]
            gone = source.lemon and event.lemon * lemons >= left
            if what == 1 and (gone or (source.counted < 1 and event.lemon * setup.num_nodes < left)):
                continue
            if state in ("wait", "manual", "planned"):
                continue
            mistaken = source.lost_nodes and not source.notice_seconds
            mistaken = mistaken and event.repair * 2**20 % 1 < faults.wrong_diagnoses
            if mistaken:
                planted.append(event.source)
            else:
                left -= source.lemon
            detect = source.detection_seconds
            if faults.detection_law != "fixed":
                detect *= -math.log1p(-event.detection)
            nodes = source.lost_nodes
            if nodes:
                mend = source.repair_seconds * (1 if faults.repair_law == "fixed" else -math.log1p(-event.repair))
                unmended = not mistaken and event.detection * 2**20 % 1 < faults.failed_repairs
                repair(nodes, detect + mend, event.source if unmended else None)
            kind = source.loss
            room = min(
                (t.spec.stall_seconds + t.spec.drain_seconds for t in tiers if kind in t.spec.survives),
                default=math.inf,
            )
            if state == "run" and source.notice_seconds and source.notice_seconds >= room:
                stop(0.0, "restart", nodes)
                continue
            need += nodes
            whole = whole or nodes > 0
            reached = position
            holds = faults.elastic and faults.elastic.keeps_state and not source.poisoned_seconds
            if holds and kind != FILE_SYSTEM and live(missing + need) > 0:
                load = 0.0
            else:
                limit = position - source.poisoned_seconds / tau if state == "run" else position
                position, load = newest(kind, limit)
                if event.corrupt < faults.corrupt_checkpoints:
                    position, again = newest(kind, position - 1e-9)
                    load += again
            rework += (reached - position) * tau
            for tier in tiers:
                if kind in tier.spec.survives:
                    tier.back_to(position)
                else:
                    tier.lose()
            person = 0.0
            if faults.manual and event.manual < faults.manual.share:
                person = -faults.manual.takes_seconds * math.log1p(-event.manual / faults.manual.share)
            later = (person, source.outage_seconds)
            stall, saving = 0.0, False
            state, then = "detect", now + detect + faults.diagnosis_seconds
        elif what == 2:
            _, _, nodes, wrong = heapq.heappop(repairs)
            before = live(missing)
            while nodes and queue and queue[0] != "own":
                queue.pop(0)
                nodes -= 1
            back = min(nodes, missing)
            if wrong is not None and nodes:
                (broken if nodes > back else planted).append(wrong)
            missing -= back
            nodes -= back
            warmed = max(0, min(nodes, faults.standbys - warm))
            warm, spares = warm + warmed, spares + nodes - warmed
            if state == "run" and live(missing) != before:
                stop(faults.elastic.reconfigure_seconds, "restart")
            elif state == "wait":
                get_nodes()
        elif what == 3:
            next_stop = now + faults.maintenance.every_seconds
            if state == "run":
                stop(faults.maintenance.takes_seconds, "planned")
        elif what == 4:
            if state == "detect" and sum(later) > 0:
                state, then, later = "manual", now + sum(later), (0.0, 0.0)
            elif state in ("detect", "manual"):
                get_nodes()
            else:
                state, then, whole = "run", math.inf, False
        elif what == 6:
            lasts = luck.exponential(faults.stragglers.lasts_seconds)
            next_slow = now + luck.exponential(gap)
            if state == "run":
                look = math.inf if faults.stragglers.found_seconds is None else faults.stragglers.found_seconds
                slow[count] = faults.stragglers.speed
                ends.append((now + min(lasts, look), count, lasts > look))
                count += 1
        elif what == 7:
            one = min(ends)
            ends.remove(one)
            del slow[one[1]]
            if state == "run" and one[2]:
                repair(1, faults.repair_seconds)
                stop(0.0, "restart", 1)
        elif what == 9:
            job = min(range(len(others)), key=lambda one: others[one][0])
            if job not in queue:
                queue.append(job)
                serve()
                mend = elsewhere.random()
                repair(1, faults.repair_seconds * (1 if faults.repair_law == "fixed" else -math.log1p(-mend)))
            others[job][0] = now + elsewhere.exponential(others[job][1])
        elif saving:
            saving, stall = False, 0.0
            if position >= target:
                return now, position * tau, rework
            for tier in tiers:
                if round(position) % tier.spec.every == 0:
                    tier.draining.append((now + tier.spec.drain_seconds, position))
                    tier.complete(now)
        else:
            position, saving = following, True
            regular = abs(position - round(position)) < 1e-9
            stall = sum(t.spec.stall_seconds for t in tiers if not regular or round(position) % t.spec.every == 0)


def policy(seed):
    """A random job, its tiers and everything that can happen to it."""
    random = np.random.default_rng(seed)

    def pick(*values):
        return values[int(random.integers(len(values)))]

    interval = pick(100.0, 300.0, 700.0)
    second = pick(1, 2, 3)
    third = second * pick(1, 4, 7)
    fourth = third * pick(1, 3)
    kinds = ("local-nvme", "peer-memory", "parallel-file-system", "object-store")
    tiers = tuple(
        SaveTier(
            name=kind, every=every, stall_seconds=stall, drain_seconds=drain, load_seconds=load,
            survives=SURVIVES[kind], keep=keep,
        )
        for kind, every, stall, drain, load, keep in (
            ("local-nvme", 1, 1.0, pick(0.0, 5.0, 60.0), 20.0, pick(2, 3)),
            ("peer-memory", second, 2.0, pick(0.0, 30.0, 90.0), 40.0, 2),
            ("parallel-file-system", third, pick(0.0, 20.0), pick(0.0, 50.0, 95.0), 120.0, pick(2, 5)),
            ("object-store", fourth, 0.0, pick(0.0, 99.0), 300.0, 1000),
        )
        if kind in kinds[: pick(3, 4, 4)] or kind == "local-nvme"
    )  # fmt: skip
    often = pick(1.0, 3.0) / (20 * DAY)
    job = {"per": "job"}
    failures = (
        Failure(component="software", rate_per_second=30 * often, lost_nodes=0, **job),
        Failure(component="gpu", rate_per_second=100 * often, **job),
        Failure(component="switch", rate_per_second=20 * often, lost_nodes=2, detection_seconds=61.0, **job,
                burst_share=pick(0.0, 0.5)),
        Failure(component="corruption", rate_per_second=20 * often, poisoned_seconds=pick(1000.0, 9000.0), **job),
        Failure(component="file system", rate_per_second=6 * often, lost_nodes=0, loses_file_system=True,
                outage_seconds=pick(0.0, 3000.0), **job),
        Failure(component="spot", rate_per_second=20 * often, lost_nodes=3, notice_seconds=pick(20.0, 200.0),
                repair_seconds=7200.0, **job),
        Failure(component="fan", rate_per_second=30 * often / 64, weibull_shape=pick(0.7, 1.5), per="node"),
    )  # fmt: skip
    faults = Faults(
        name="random", failures=failures, detection_seconds=30.0, detection_law=pick("fixed", "exponential"),
        diagnosis_seconds=pick(0.0, 45.0), restart_phases={"requeue": pick(60.0, 500.0), "warm-up": 100.0},
        manual=pick(None, Manual(share=0.1, takes_seconds=4000.0)), in_job_restart_seconds=pick(None, 50.0),
        repair_seconds=pick(0.2, 1.0) * DAY, repair_law=pick("fixed", "exponential"), repair_crews=pick(None, None, 4),
        spares=pick(None, 3, 6, 12), standbys=pick(0, 2), corrupt_checkpoints=pick(0.0, 0.1),
        rate_spread=pick(0.0, 0.3),
        elastic=pick(None, Elastic(reconfigure_seconds=80.0, gather=bool(pick(0, 1)), keeps_state=bool(pick(0, 0, 1)))),
        stragglers=pick(None, Stragglers(rate_per_second=3 / DAY / 64, speed=pick(0.5, 0.9), lasts_seconds=7200.0,
                                         found_seconds=pick(None, 1800.0))),
        maintenance=pick(None, Maintenance(every_seconds=3.3 * DAY, takes_seconds=1800.0)),
        lemons=pick(None, Lemons(share=0.1, factor=10)),
    )  # fmt: skip
    if random.integers(2):
        faults = faults.model_copy(update={
            "wrong_diagnoses": pick(0.0, 0.2), "failed_repairs": pick(0.0, 0.3), "recurs_seconds": pick(300.0, 5000.0),
            "spares_shared_with": pick((), (64,), (128, 32)) if faults.spares else (),
        })  # fmt: skip
    fixed_work = bool(random.integers(2))
    return RunSetup(
        step_seconds=interval / 10, num_steps=int(random.integers(3000, 20_000)) if fixed_work else 10**7,
        tokens_per_step=1, interval_steps=10, tiers=tiers, faults=faults, num_gpus=512, num_nodes=64, replica_nodes=4,
        slow=pick({}, {"data": 0.8}), horizon_seconds=20 * DAY,
    )  # fmt: skip


@pytest.mark.parametrize("block", range(6))
def test_equal_to_a_loop_in_which_everything_is_an_event(block):
    for seed in range(20 * block, 20 * block + 20):
        setup = policy(seed)
        played = simulate_run(setup, seed)
        if not played.completed:
            continue  # given up, which the loop does not do
        wall, useful, rework = loop(setup, seed)
        found = (played.wall_seconds, played.useful_seconds, played.lost_seconds["rework"])
        assert found == pytest.approx((wall, useful, rework), abs=1e-4), seed
        booked = played.useful_seconds + math.fsum(played.lost_seconds.values())
        assert booked == pytest.approx(played.wall_seconds, abs=1e-5), seed
        assert min(played.lost_seconds.values()) > -1e-6, seed
