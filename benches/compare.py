#!/usr/bin/env python3
"""Runs semel and Kafka Streams in turn on the same work, broker and input, and prints medians.

The work is the Kafka stage of topologies/orders.toml: drop cancelled orders, add a product, drop a member. Nothing else
should run on the machine. It takes the development cluster for itself, which must not be up.

    benches/compare.py [--records 2000000] [--rounds 5] [--latency-seconds 20] [--raw runs.jsonl]

Needs cargo, Java 17 and Maven.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEMEL = ROOT / "target/release/semel"
TOPOLOGY = (ROOT / "topologies/orders.toml").read_text().split("[[tests]]")[0]


# What Kafka Streams takes: a record that is no JSON ends it. Without transactions, so that the end is a record's.
CLEAN = """
name = "clean"
guarantee = "at-least-once"
kafka.brokers = "${KAFKA_BROKERS}"
[sources.orders]
type = "kafka"
topics = ["orders"]
[sinks.clean]
type = "kafka"
inputs = ["orders"]
topic = "orders.clean"
create = { partitions = 4 }
"""


def run(command, **how):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **how)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


class Semel:
    name = "semel"

    def __init__(self, folder, brokers):
        self.folder, self.brokers, self.runs = folder, brokers, 0

    def start(self, guarantee, interval, source, drain):
        """A process; its topics are its own."""
        self.runs += 1
        name = f"semel-{self.runs}"
        text = TOPOLOGY.replace('name = "orders"', f'name = "{name}"')
        text = text.replace('guarantee = "exactly-once"', f'guarantee = "{guarantee}"')
        text = text.replace('commit_interval = "100ms"', f'commit_interval = "{interval}ms"')
        text = text.replace('topics = ["orders"]', f'topics = ["{source}"]')
        text = text.replace('topic = "orders.priced"', f'topic = "{name}.out"')
        text = text[: text.index("# One row an order")]
        file = self.folder / f"{name}.toml"
        file.write_text(text)
        environment = {**os.environ, "KAFKA_BROKERS": self.brokers, "XDG_STATE_HOME": str(self.folder)}
        command = [SEMEL, "run", file, "--quiet", "--json"] + (["--drain"] if drain else [])
        return start(command, environment), f"{name}.out"

    def measure(self, guarantee, interval):
        process, _ = self.start(guarantee, interval, "orders.clean", drain=True)
        report = json.loads(finish(process))
        stage = report["stages"][0]
        return {
            "records_per_s": stage["in"] / stage["busy_seconds"],
            "cpu_s_per_million": report["cpu_seconds"] * 1e6 / stage["in"],
            "peak_rss_mib": report["peak_memory_bytes"] / 2**20,
        }


class KafkaStreams:
    name = "kafka-streams"
    guarantees = {"exactly-once": "exactly_once_v2", "at-least-once": "at_least_once"}

    def __init__(self, folder, brokers):
        self.folder, self.brokers, self.runs = folder / "peer", brokers, 0
        shutil.copytree(ROOT / "benches/peer", self.folder)
        maven = ["mvn", "-q", "-B", "compile", "dependency:copy-dependencies", "-DoutputDirectory=target/libs"]
        run(maven, cwd=self.folder)

    def start(self, guarantee, interval, source, drain, seconds=0):
        self.runs += 1
        output = f"peer-{self.runs}.out"
        make_topic(self.brokers, self.folder, output)
        command = ["java", "-Xmx2g", "-cp", "target/classes:target/libs/*", "Peer", f"--brokers={self.brokers}"]
        command += ["--topology=orders", f"--guarantee={self.guarantees[guarantee]}"]
        command += [f"--commit-interval-ms={interval}", "--threads=1", f"--input={source}", f"--output={output}"]
        # At a fixed rate nothing should wait for more; else it gathers, as its throughput wants.
        command += [] if drain else [f"--run-for-s={seconds}", "--linger-ms=0"]
        return start(command, os.environ, self.folder), output

    def measure(self, guarantee, interval):
        process, _ = self.start(guarantee, interval, "orders.clean", drain=True)
        report = json.loads(finish(process).strip().splitlines()[-1])
        return {key: report[key] for key in ("records_per_s", "cpu_s_per_million", "peak_rss_mib")}


def start(command, environment, folder=ROOT):
    command = [str(part) for part in command]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def finish(process):
    output, _ = process.communicate(timeout=300)
    if process.returncode != 0:
        raise SystemExit(f"{process.args[0]} ended with {process.returncode}")
    return output


def make_topic(brokers, folder, topic):
    run(["java", "-cp", "target/libs/*", "MakeTopic.java", brokers, topic], cwd=folder)


def latency(engine, interval, seconds, peer):
    source = f"timed-{engine.name}-{interval}-{time.monotonic_ns()}"
    make_topic(engine.brokers, peer.folder, source)
    lasts = {"seconds": seconds + 40} if engine is peer else {}
    process, output = engine.start("exactly-once", interval, source, drain=False, **lasts)
    probe = [SEMEL, "probe", "--brokers", engine.brokers, "--input", source, "--output", output]
    found = json.loads(run(probe + ["--rate", 5000, "--seconds", seconds]))
    process.terminate()
    process.wait()
    return {"p50_ms": found["p50"], "p95_ms": found["p95"], "p99_ms": found["p99"], "max_ms": found["max"]}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--records", type=int, default=2_000_000)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--latency-seconds", type=int, default=20, help="0 leaves latency out")
    arguments.add_argument("--raw", type=pathlib.Path)
    options = arguments.parse_args()
    run(["cargo", "build", "--release"], cwd=ROOT)
    run([SEMEL, "quickstart", "--keep", "--records", options.records])
    found = {}

    def note(measure, engine, guarantee, interval, figures):
        found.setdefault((measure, engine.name, guarantee, interval), []).append(figures)
        if options.raw:
            row = {"measure": measure, "engine": engine.name, "guarantee": guarantee, "commit_interval_ms": interval}
            with options.raw.open("a") as raw:
                raw.write(json.dumps({**row, **figures}) + "\n")

    try:
        brokers = re.search(r"KAFKA_BROKERS='?([^'\s]+)", run([SEMEL, "dev", "up"])).group(1)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            peer = KafkaStreams(folder, brokers)
            engines = [Semel(folder, brokers), peer]
            (folder / "clean.toml").write_text(CLEAN)
            environment = {**os.environ, "KAFKA_BROKERS": brokers, "XDG_STATE_HOME": str(folder)}
            run([SEMEL, "run", folder / "clean.toml", "--drain", "--quiet"], env=environment)
            for _ in range(options.rounds):
                for guarantee in ("exactly-once", "at-least-once"):
                    for engine in engines:
                        note("throughput", engine, guarantee, 100, engine.measure(guarantee, 100))
            for interval in (10, 100) if options.latency_seconds else ():
                for _ in range(min(options.rounds, 3)):
                    for engine in engines:
                        timed = latency(engine, interval, options.latency_seconds, peer)
                        note("latency", engine, "exactly-once", interval, timed)
    finally:
        run([SEMEL, "dev", "down"])
    for (measure, engine, guarantee, interval), runs in found.items():
        medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        print(measure, engine, guarantee, f"{interval}ms", *(f"{key}={value}" for key, value in medians.items()))


if __name__ == "__main__":
    main()
