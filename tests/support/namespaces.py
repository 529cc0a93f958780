"""Hosts and switches in network namespaces, with links shaped by token buckets; everything is removed afterwards.

Each host is a namespace with one interface per rail. A namespace of switches holds, per rail, two leaf bridges joined
by one "spine" cable, so nothing ever touches the machine's own interfaces. Rates hold in both directions of a cable.
"""

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).with_name("gloo_worker.py")
MOST_RANKS, MOST_MBIT = 4, 400
SEGMENTS = 8
PREFIX, NUMBERS = "headway-test-", itertools.count()
START_SECONDS, ANSWER_SECONDS = 60, 40


def why_not():
    """Say what is missing here; None where the tests can run."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs the program {tool!r}"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        if run("ip", "netns", "add", probe, check=False):
            return "cannot create network namespaces here"
        if run("ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1", netns=probe, check=False):
            return "the kernel has no veth"
        if run("ip", "link", "add", "probe2", "type", "bridge", netns=probe, check=False):
            return "the kernel has no bridge"
        if run(
            "tc",
            *("qdisc", "add", "dev", "probe0", "root", "tbf", "rate", "100mbit", "burst", "32000", "latency", "5ms"),
            netns=probe,
            check=False,
        ):
            return "the kernel has no token bucket filter (tbf)"
    finally:
        run("ip", "netns", "del", probe, check=False)
    return None


def run(*command, netns=None, check=True):
    inside = ("ip", "netns", "exec", netns) if netns else ()
    done = subprocess.run([*inside, *command], capture_output=True, text=True, timeout=20, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.returncode


class Hosts:
    """Hosts with interfaces rail0, rail1 ...; the first half of them stands on leaf 0, the rest on leaf 1."""

    def __init__(self, hosts, rails):
        assert hosts <= MOST_RANKS
        remove_stale()
        self.prefix = f"{PREFIX}{os.getpid()}-{next(NUMBERS)}-"
        self.hosts, self.rails = hosts, rails
        self.switches = f"{self.prefix}sw"
        self.workers = []

    def __enter__(self):
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def _build(self):
        run("ip", "netns", "add", self.switches)
        for rail in range(self.rails):
            for leaf in (0, 1):
                self._link("add", f"r{rail}l{leaf}", "type", "bridge")
                self._link("set", f"r{rail}l{leaf}", "up")
            self._link("add", f"r{rail}u0", "type", "veth", "peer", "name", f"r{rail}u1")
            for leaf in (0, 1):
                self._link("set", f"r{rail}u{leaf}", "master", f"r{rail}l{leaf}", "up")
                self._small_packets(self.switches, f"r{rail}u{leaf}")
        for host in range(self.hosts):
            name = self.host(host)
            run("ip", "netns", "add", name)
            run("ip", "link", "set", "lo", "up", netns=name)
            for rail in range(self.rails):
                port = f"h{host}r{rail}"
                self._link("add", port, "type", "veth", "peer", "name", f"rail{rail}", "netns", name)
                self._link("set", port, "master", f"r{rail}l{host * 2 // self.hosts}", "up")
                run("ip", "addr", "add", f"10.77.{rail}.{host + 1}/24", "dev", f"rail{rail}", netns=name)
                run("ip", "link", "set", f"rail{rail}", "up", netns=name)
                self._small_packets(self.switches, port)
                self._small_packets(name, f"rail{rail}")

    def _link(self, *words):
        run("ip", "link", *words, netns=self.switches)

    @staticmethod
    def _small_packets(netns, device):
        """Hand at most eight packets on at once: small against a token bucket, and cheap for busy cores."""
        run("ip", "link", "set", "dev", device, "gso_max_segs", str(SEGMENTS), netns=netns)

    def host(self, number):
        return f"{self.prefix}h{number}"

    def shape(self, host, rail, mbit):
        """Limit one cable of a host, both ways."""
        self._limit(self.host(host), f"rail{rail}", mbit)
        self._limit(self.switches, f"h{host}r{rail}", mbit)

    def shape_spine(self, rail, mbit):
        """Limit the cable between the two leaves of a rail, both ways."""
        for leaf in (0, 1):
            self._limit(self.switches, f"r{rail}u{leaf}", mbit)

    def shape_all(self, mbit):
        """Every cable at one rate; a spine carries what two hosts send."""
        for rail in range(self.rails):
            self.shape_spine(rail, 2 * mbit)
            for host in range(self.hosts):
                self.shape(host, rail, mbit)

    @staticmethod
    def _limit(netns, device, mbit):
        assert mbit <= 2 * MOST_MBIT
        words = f"rate {mbit}mbit burst {max(32000, int(mbit * 200))} latency 50ms".split()
        run("tc", "qdisc", "replace", "dev", device, "root", "tbf", *words, netns=netns)

    def start(self, placement):
        """Start one worker per (host, rail of its traffic)."""
        assert len(placement) <= MOST_RANKS
        for rank, (host, rail) in enumerate(placement):
            environment = dict(
                os.environ,
                RANK=str(rank),
                WORLD_SIZE=str(len(placement)),
                MASTER_ADDR="10.77.0.1",
                MASTER_PORT="29411",
                GLOO_SOCKET_IFNAME=f"rail{rail}",
                OMP_NUM_THREADS="1",
                PYTHONWARNINGS="ignore",
            )
            command = ["ip", "netns", "exec", self.host(host), sys.executable, str(WORKER)]
            self.workers.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        self._answers(START_SECONDS)

    def measure(self, operation, size_bytes, *, repeats=5, groups=None, device=None):
        """Run a collective on all ranks (or in each group at once); all over ``device`` where it is given.

        Returns the seconds of each repeat, and the bytes that each rank sent in one.
        """
        request = {
            "operation": operation,
            "size_bytes": size_bytes,
            "repeats": repeats,
            "groups": groups,
            "device": device,
        }
        for worker in self.workers:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        answers = self._answers(ANSWER_SECONDS)
        seconds = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
        return seconds, [answer["sent_bytes"] for answer in answers]

    def _answers(self, seconds):
        deadline = time.monotonic() + seconds
        answers = []
        for worker in self.workers:
            ready, _, _ = select.select([worker.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError("a worker gave no answer in time")
            line = worker.stdout.readline()
            if not line:
                worker.kill()
                raise RuntimeError(f"a worker ended: {worker.communicate()[1][-2000:]}")
            answers.append(json.loads(line))
        return answers

    def close(self):
        """End every process that was started and remove every namespace; links and bridges go with them."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        for worker in self.workers:
            worker.wait(timeout=10)
            for stream in (worker.stdin, worker.stdout, worker.stderr):
                with contextlib.suppress(OSError):
                    stream.close()
        self.workers = []
        for name in (*(self.host(number) for number in range(self.hosts)), self.switches):
            run("ip", "netns", "del", name, check=False)


def left_over(prefix):
    """Namespaces of a prefix that still exist."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in names.splitlines() if line.startswith(prefix)]


def remove_stale():
    """Remove what a test run that was killed left behind."""
    for name in left_over(PREFIX):
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            run("ip", "netns", "del", name, check=False)
