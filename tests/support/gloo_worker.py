"""One rank of a gloo job: reads a request a line, runs the collective, answers with seconds and bytes on the wire."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def sent_bytes(device):
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise KeyError(device)


def operation_of(name, size_bytes, group):
    ranks = dist.get_process_group_ranks(group)
    rank, world = dist.get_rank(), len(ranks)
    count = size_bytes // 4 // world * world
    whole, part, other = torch.ones(count), torch.ones(count // world), torch.empty(count)

    def send_recv():
        if rank == ranks[0]:
            dist.send(whole, ranks[-1], group=group)
        elif rank == ranks[-1]:
            dist.recv(other, ranks[0], group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(other, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": send_recv,
    }[name]


def main():
    torch.set_num_threads(1)
    own = os.environ["GLOO_SOCKET_IFNAME"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    groups = {}
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        wanted = request["groups"] or [list(range(dist.get_world_size()))]
        device = request["device"] or own
        os.environ["GLOO_SOCKET_IFNAME"] = device
        mine = None
        for ranks in wanted:
            key = (device, *ranks)
            if key not in groups:
                groups[key] = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine = groups[key]
        act = operation_of(request["operation"], request["size_bytes"], mine) if mine is not None else lambda: None
        act()
        seconds = []
        dist.barrier()
        before = sent_bytes(device)
        for _ in range(request["repeats"]):
            dist.barrier()
            start = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - start)
        dist.barrier()
        answer({"seconds": seconds, "sent_bytes": (sent_bytes(device) - before) / request["repeats"]})
    dist.destroy_process_group()


def answer(content):
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
