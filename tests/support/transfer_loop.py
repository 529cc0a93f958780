"""The independent loop of whole runs on a shared storage: every save, stall, drain and transfer is an event."""

import heapq
import math
from itertools import islice

from simulator.failures import failure_events, generator


def water(flows):
    """Shares of all flows; the copy moves as fast as the slower of its two storages lets it.

    A flow is ``[seconds left, cap, ...]`` on the main storage, unless its key says that it is elsewhere or on both.
    """
    loads = {key: loads_of(key, flow) for key, flow in flows.items()}
    here, there = ({key: flows[key][1] * loads[key][store] for key in flows if store in loads[key]}
                   for store in ("disk", "archive"))  # fmt: skip
    if "copy" in flows:
        pace = min(filled(caps)["copy"] / loads["copy"][store] for store, caps in (("disk", here), ("archive", there)))
        here["copy"], there["copy"] = pace * loads["copy"]["disk"], pace * loads["copy"]["archive"]
    found = {key: share for caps in (here, there) for key, share in filled(caps).items()}
    return found | ({"copy": pace} if "copy" in flows else {})


def filled(caps):
    """Shares of one storage: whoever wants less than an equal part gets it, the rest is divided again."""
    left, open_, found = 1.0, dict(caps), {}
    while open_:
        equal = left / len(open_)
        small = [key for key, cap in open_.items() if cap <= equal]
        for key in small or list(open_):
            cap = open_.pop(key)
            found[key] = cap if small else equal
        left -= sum(found[key] for key in small)
    return found


def loads_of(key, flow):
    """What a flow takes of each storage's time for a share of 1."""
    return flow[2] if key in ("copy", "replicate", "restore", "data") and len(flow) > 2 else {"disk": 1.0}


def loop(setup, seed):
    """One happening at a time; returns wall seconds, useful seconds, rework, skipped saves, far saves and archived."""
    faults, store, tau, sources = setup.faults, setup.played, setup.interval_seconds, setup.sources
    events = list(islice(failure_events(sources, seed, 0), 3000))
    near = setup.tiers[0] if store.tier else None
    far, archive = setup.tiers[store.tier], store.archive
    copied = archive is not None and archive.write is not None
    behind = setup.tiers[archive.tier] if archive else None
    where = {"archive" if copied else "disk": 1.0}
    out = archive.read if copied else store.read
    random = generator("storage", seed, 0)
    clock = []  # others: (time, kind, job)
    for job, other in enumerate(store.others):
        clock.append((other.every_seconds if other.in_phase else random.uniform(0, other.every_seconds), "save", job))
        if math.isfinite(other.mtbf_seconds):
            clock.append((random.exponential(other.mtbf_seconds), "fail", job))
    heapq.heapify(clock)
    now, position, state, then, stall, index = 0.0, 0.0, "run", math.inf, 0.0, 0
    ram, ram_draining, disk, flows = [0.0], [], [0.0], {}
    kept, archived, archiving = [0.0], 0, None
    rework, skipped, written, need, missing, spares = 0.0, 0, 0, 0, 0, faults.spares
    repairs, storms, load, reads, olds, later = [], [], 0.0, 0, 0, 0.0
    empty, unread = (setup.num_nodes, store.cache_bytes) if store.cache_bytes else (0, 0.0)
    target, replicas = setup.num_steps / setup.interval_steps, setup.num_nodes / setup.replica_nodes
    lasting = math.prod(setup.slow.values())
    data_rate, data_loads = (archive.read, where) if store.data_store == "archive" else (store.read, {"disk": 1.0})
    restart, following = sum(faults.phases_seconds.values()), 1.0

    def live(broken):
        return 1.0 if not faults.elastic else max(0.0, replicas - math.ceil(broken / setup.replica_nodes)) / replicas

    def data_flow():
        """What training reads at this moment, and how much of it it needs."""
        nonlocal unread
        wanted = lasting * live(missing)
        if store.cache_bytes:
            share = empty / setup.num_nodes
            if empty and "data" not in flows:
                cap = min(share * store.nodes_cap, store.data_cap)
                flows["data"] = [unread / data_rate, min(1.0, cap / data_rate), data_loads]
            return wanted, store.data * wanted * share
        cap = min(store.data * wanted, store.data_cap) / data_rate
        if cap:
            flows["data"] = [math.inf, min(1.0, cap), data_loads]
        return wanted, store.data * wanted

    def stop_reading():
        nonlocal unread
        if "data" in flows:
            left = flows.pop("data")[0]
            if empty:
                unread = left * data_rate

    def get_nodes():
        nonlocal need, spares, missing, state, then, empty, unread
        again, taken = restart, need
        if need > spares:
            if not faults.elastic or live(missing + need - spares) == 0:
                state, then = "wait", math.inf
                return
            missing += need - spares
            taken, again = spares, faults.elastic.reconfigure_seconds
        spares -= taken
        join(taken)
        need, state, then = 0, "restart", now + again + load

    def join(nodes):
        nonlocal empty, unread
        if nodes and store.cache_bytes:
            empty = min(setup.num_nodes, empty + nodes)
            part = store.cache_bytes / setup.num_nodes
            unread = min(unread + nodes * part, empty * part)

    def newest(kind, limit):
        tiers = [(near, ram)] if near else []
        tiers += [(far, disk)] + ([(behind, kept)] if archive else [])
        found = [(one, -tier.load_seconds, tier) for tier, saves in tiers if kind in tier.survives
                 for one in saves if one <= limit]  # fmt: skip
        return max(found, key=lambda one: one[:2], default=(0.0, 0.0, None))

    def saved(position):
        """A save is complete, and perhaps on its way to the archive."""
        nonlocal disk, skipped, archived, archiving
        disk = [*disk, position][-far.keep :]
        if archive and round(position) % archive.every == 0:
            if "copy" in flows or "replicate" in flows:
                skipped += 1
                return
            archived, archiving = archived + 1, round(position)
            if copied:
                rate = min(store.read, archive.write)
                loads = {"disk": rate / store.read, "archive": rate / archive.write}
                flows["copy"] = [archive.copy_bytes / rate, 1.0, loads]
            else:
                send()

    def send():
        if archive.replicate_bytes:
            flows["replicate"] = [archive.replicate_bytes / out, min(1.0, archive.site_cap / out), where]
        else:
            there()

    def there():
        nonlocal kept
        kept = [*kept, archiving][-behind.keep :]

    while True:
        running = state in ("run", "stall")
        wanted, needed = data_flow() if running else (0.0, 0.0)
        shares = water(flows)
        got = shares.get("data", 0.0) * data_rate
        allowed = 1.0 if got >= needed * (1 - 1e-9) else got / needed
        speed = wanted * allowed if state == "run" else 0.0
        if state not in ("run", "stall"):
            following = min(math.floor(position + 1e-9) + 1, target)
        own = math.inf
        if state == "run":
            own = now + max(0.0, following - position) * tau / speed if speed else math.inf
        elif state == "stall":
            own = now + stall
        ends = {key: now + flow[0] / shares[key] for key, flow in flows.items() if shares[key] > 0}
        first = min(ends, key=ends.get, default=None)
        moments = [
            setup.horizon_seconds, events[index].time_seconds, repairs[0][0] if repairs else math.inf, then, own,
            ends[first] if first is not None else math.inf, clock[0][0] if clock else math.inf,
            min(storms, default=math.inf),
        ]  # fmt: skip
        what = min(range(8), key=moments.__getitem__)
        passed, now = moments[what] - now, moments[what]
        position = min(following, position + speed * passed / tau)
        stall = max(0.0, stall - passed) if state == "stall" else stall
        for key, flow in flows.items():
            flow[0] -= shares[key] * passed
        if running:
            ram += [one for ready, one in ram_draining if ready <= now]
            ram_draining = [one for one in ram_draining if one[0] > now]
            ram = ram[-near.keep :] if near else ram
        if what == 0:
            return now, position * tau, rework, skipped, written, archived
        if what == 1:
            event = events[index]
            index += 1
            source = sources[event.source]
            if state in ("wait", "idle"):
                continue
            stop_reading()
            flows.pop("save", None)
            flows.pop("restore", None)
            ram_draining = []
            if source.lost_nodes:
                heapq.heappush(repairs, (now + source.detection_seconds + source.repair_seconds, source.lost_nodes))
                need += source.lost_nodes
            reached, load, reads, olds = position, 0.0, 0, 0
            poisoned = source.poisoned_seconds / tau if running or state == "sync" else 0.0
            for _ in range(1 + (event.corrupt < faults.corrupt_checkpoints)):
                limit = position - 1e-9 if reads or olds or load else position - poisoned
                position, seconds, tier = newest(source.loss, limit)
                reads += tier is far
                olds += archive is not None and tier is behind
                load += -seconds if tier is near and near else 0.0
            rework += (reached - position) * tau
            ram = [one for one in ram if one <= position] if near and source.loss in near.survives else []
            disk = [one for one in disk if one <= position] if source.loss in far.survives else []
            kept = [one for one in kept if one <= position] if archive and source.loss in behind.survives else []
            newer = archiving is not None and archiving > position
            if newer or source.loss not in far.survives:
                flows.pop("copy", None)
                if newer or not copied:
                    flows.pop("replicate", None)
            later = source.outage_seconds
            if later:
                storms.append(now + source.detection_seconds + later + restart)
            state, then = "detect", now + source.detection_seconds
        elif what == 2:
            _, nodes = heapq.heappop(repairs)
            back = min(nodes, missing)
            changes = live(missing) != live(missing - back)
            missing -= back
            spares += nodes - back
            join(back)
            if running and changes:
                raise AssertionError("not in these policies: an elastic job grows by a pause")
            if state == "wait":
                get_nodes()
        elif what == 3:
            if state == "detect" and later:
                state, then, later = "idle", now + later, 0.0
            elif state in ("detect", "idle"):
                get_nodes()
            elif reads or olds:
                state, then = "loading", math.inf
                if reads:
                    size, cap = reads * store.restore_bytes, store.nodes_cap
                    flows["restore"] = [size / store.read, min(1.0, cap / store.read)]
                else:
                    flows["restore"] = [olds * store.restore_bytes / out, min(1.0, store.nodes_cap / out), where]
                    olds = 0
            else:
                state, then = "run", math.inf
        elif what == 4 and state == "run":
            position = following
            regular = abs(position - round(position)) < 1e-9
            to_far = not regular or round(position) % far.every == 0
            stall = (near.stall_seconds if near else 0.0) + (far.stall_seconds if to_far and not store.stops else 0.0)
            state = "stall"
        elif what == 4:
            to_far = position >= target or round(position) % far.every == 0
            if near and position < target:
                ram_draining.append((now + near.drain_seconds, position))
            state, following = "run", min(position + 1, target)
            if position >= target and not store.stops:
                return now, position * tau, rework, skipped, written + (round(position) % far.every == 0), archived
            if to_far and "save" in flows:
                skipped += 1
            elif to_far:
                written += 1
                flows["save"] = [store.save_bytes / store.write, min(1.0, store.save_cap / store.write), position]
                if store.stops:
                    stop_reading()
                    state = "sync"
        elif what == 5:
            flow = flows.pop(first)
            if first == "save":
                saved(flow[2])
                if state == "sync":
                    if flow[2] >= target:
                        return now, position * tau, rework, skipped, written, archived
                    state = "run"
            elif first == "copy":
                send()
            elif first == "replicate":
                there()
            elif first == "restore" and olds:
                flows["restore"] = [olds * store.restore_bytes / out, min(1.0, store.nodes_cap / out), where]
                olds = 0
            elif first == "restore":
                state = "run"
            elif first == "data":
                empty, unread = 0, 0.0
        elif what == 6:
            _, kind, job = heapq.heappop(clock)
            other = store.others[job]
            size, cap = other.save_bytes, other.cap_bytes_per_second
            if kind == "save":
                if ("w", job) not in flows and ("r", job) not in flows:
                    flows["w", job] = [size / store.write, min(1.0, cap / store.write)]
                heapq.heappush(clock, (now + other.every_seconds, "save", job))
            else:
                flows.pop(("w", job), None)
                flows["r", job] = [size / store.read, min(1.0, cap / store.read)]
                heapq.heappush(clock, (now + random.exponential(other.mtbf_seconds), "fail", job))
        else:
            storms.remove(now)
            for job, other in enumerate(store.others):
                flows.pop(("w", job), None)
                flows["r", job] = [other.save_bytes / store.read, min(1.0, other.cap_bytes_per_second / store.read)]
