"""hacpo_mega beside TRL on this machine: the same models, prompts, answers and updates, in turns, round after round.

    make bench-peers                                 the quickstart's pair; installs TRL in an environment of its own
    .venv/bin/python launch/peers/bench.py CONFIG    any configuration of agents that have one process each

Every agent alone by GSPO, then all of them: hacpo_mega at once, TRL one after the other and at once. Differences:
docs/measurements/peers.md. Heavy imports are inside functions: bad input is said first, and ranks are forked from a
server.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from table import Turn, at_once, in_turns, read_turn, resident, to_markdown, whole

from hacpo_lab.throughput.schedules import STEPS_ONLY
from hacpo_mega.cluster.machine.environment import prepare_environment
from hacpo_mega.config import Config, load_config

if TYPE_CHECKING:
    from hacpo_lab.throughput.workload import Workload

OURS, THEIRS, IN_TURNS, AT_ONCE = "hacpo_mega", "TRL", "TRL, one after the other", "TRL, at once"
WARM_UP = 1
ASK_VERSIONS = (
    "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('trl', 'torch', 'transformers')))"
)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--peer", type=Path, default=Path("build/peers-env/bin/python"), help="a Python that has TRL")
    parser.add_argument("--answer-tokens", type=int, help="of every answer; half of the longest if not given")
    parser.add_argument("--lengths", type=Path, metavar="RUN", help="draw every answer's tokens from those of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured in a turn, after one of warm-up")
    parser.add_argument("--out", type=Path, default=Path("build/peers"), help="folder of peers.md")
    return parser.parse_intermixed_args()


def checked(asked: argparse.Namespace) -> tuple[Config, str]:
    """The configuration of all agents under GSPO, and the peer's versions. ValueError with a line per problem."""
    if min(asked.rounds, asked.steps) < 1:
        raise ValueError(f"--rounds ({asked.rounds}) and --steps ({asked.steps}) must be at least 1")
    if not asked.peer.is_file():
        raise ValueError(f"{asked.peer} is not there: make bench-peers creates it from launch/lock/peers.txt")
    said = subprocess.run([asked.peer, "-c", ASK_VERSIONS], capture_output=True, text=True)
    if said.returncode:
        raise ValueError(f"{asked.peer} has no TRL ({said.stderr.strip().splitlines()[-1]}): use make bench-peers")
    steps = (*STEPS_ONLY, f"num_steps={WARM_UP + asked.steps + 1}")
    config = load_config(asked.config, [*asked.overrides, *steps, "algorithm.method=gspo"])
    for agent in config.agents:
        if config.lanes * agent.cells_per_lane * agent.tp * agent.pp > 1:
            raise ValueError(f"{agent.name} has several processes: TRL is compared with lanes, cells, tp and pp of 1")
        if not (agent.model / "config.json").is_file():
            raise ValueError(f"{agent.model} holds no model: hacpo-mega init {asked.config} creates it")
    return config, said.stdout.strip()


class Machine:
    """Takes turns on this machine: the work is the same for both, fixed by configuration and workload."""

    def __init__(
        self, config: Config, workload: "Workload", asked: argparse.Namespace, peer: Mapping[str, str]
    ) -> None:
        """`peer` is the environment of TRL's processes."""
        from hacpo_lab.experiments.campaign import PRELOAD
        from hacpo_lab.forked import JobServer
        from hacpo_mega.data.prompt_sets import training_sampler
        from hacpo_mega.samples.tokenizers import agent_codecs, longest_encodings

        self.config, self.workload, self.asked, self._peer = config, workload, asked, peer
        self.server = JobServer(PRELOAD)
        self._codecs = agent_codecs(config.agents)
        sampler, _ = training_sampler(config, longest_encodings(config.agents, self._codecs))
        self._prompts = [prompt.text for step in range(WARM_UP + asked.steps) for prompt in sampler.at(step)]

    def ours(self, places: Sequence[int], folder: Path) -> Turn:
        """These agents, by hacpo_mega at once. RuntimeError when a rank fails."""
        from hacpo_lab.throughput.measure import measured_steps
        from hacpo_mega.logbook.run.run_folder import resolved_toml

        folder.mkdir(parents=True)
        agents = tuple(self.config.agents[place] for place in places)
        file = folder / "config.toml"
        config = self.config.model_copy(update={"agents": agents, "run_dir": folder / "run"})
        file.write_text(resolved_toml(config), encoding="utf-8")
        num_steps = WARM_UP + self.asked.steps
        statuses = self.server.run(len(places), folder, measured_rank, str(file), num_steps, self.workload)
        if set(statuses) != {0}:
            raise RuntimeError(f"hacpo_mega ended with {statuses}: {(folder / '0.err').read_text()[-2000:]}")
        steps = measured_steps(folder / "run", [agent.name for agent in agents], WARM_UP)
        done = [agent for step in steps for agent in step.agents.values()]
        ranks = [json.loads((folder / f"{agent.name}.json").read_text()) for agent in agents]
        return Turn(
            num_steps=len(steps),
            wall_s=sum(step.wall_s for step in steps),
            cpu_s=sum(rank["cpu_s"] for rank in ranks),
            generated=round(sum(agent.tokens for agent in done)),
            trained=round(sum(agent.trained_tokens for agent in done)),
            peak_bytes=sum(rank["peak_bytes"] for rank in ranks),
            imported_bytes=sum(rank["imported_bytes"] for rank in ranks),
        )

    def theirs(self, places: Sequence[int], folder: Path) -> list[Turn]:
        """Each of these agents by TRL, all from a common start. RuntimeError when one of them fails."""
        threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // len(places)))
        with ExitStack() as stack:
            processes = [stack.enter_context(self.peer_process(place, folder, threads)) for place in places]
            for process in processes:
                stack.callback(process.kill)
                while (line := process.stdout.readline()) and line != "ready\n":
                    pass
            for process in processes:
                process.communicate("\n" * self.asked.steps)
        for place, process in zip(places, processes, strict=True):
            if process.returncode:
                raise RuntimeError(f"TRL failed: {(folder / f'{place}/err').read_text()[-2000:]}")
        return [whole(self.read(place, folder, threads)) for place in places]

    def read(self, place: int, folder: Path, threads: int) -> list[Turn]:
        """The measured steps of an agent that TRL has trained. ValueError where it was other work than ours."""
        return read_turn(
            folder / f"{place}/measured.json",
            tokens=[sum(self._lengths(place, WARM_UP + step)) for step in range(self.asked.steps)],
            prompt_tokens=sum(self._codecs[place].prompt_lengths(self._prompts)),
            threads=threads,
        )

    def _lengths(self, place: int, step: int) -> list[int]:
        """Tokens of an agent's answers in a step: prompt after prompt, each with all of its answers."""
        name, num_answers = self.config.agents[place].name, self.config.answers_per_prompt
        places = [(p, g) for p in range(self.config.training.prompts_per_step) for g in range(num_answers)]
        return [self.workload.answer(name, step, p, g)[0] for p, g in places]

    def peer_process(self, place: int, folder: Path, threads: int) -> subprocess.Popen:
        """TRL on this agent, which says `ready` and waits for a line before every measured step."""
        mine = folder / str(place)
        mine.mkdir(parents=True)
        (mine / "work.json").write_text(json.dumps(self._work(place)), encoding="utf-8")
        script = Path(__file__).with_name("trl_gspo.py")
        command = [self.asked.peer, script, mine / "work.json", mine / "measured.json"]
        environment = {**self._peer, "OMP_NUM_THREADS": str(threads)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (mine / "err").open("w") as err:
            return subprocess.Popen(command, env=environment, stderr=err, **pipes)

    def _work(self, place: int) -> dict[str, Any]:
        """The work that trl_gspo.py is asked to do for an agent."""
        config, agent = self.config, self.config.agents[place]
        optimizer = agent.optimizer.model_dump(include={"lr", "betas", "weight_decay", "clip_grad"})
        algorithm = config.algorithm.model_dump(include={"eps_low", "eps_high"})
        return {
            "model": str(agent.model),
            "prompts": self._prompts,
            "warm_up": WARM_UP,
            "steps": self.asked.steps,
            "answer_tokens": self.workload.tokens,
            "lengths": [self._lengths(place, step) for step in range(WARM_UP + self.asked.steps)],
            "answers_per_prompt": config.answers_per_prompt,
            "answers_per_update": config.prompts_per_update * config.answers_per_prompt,
            "updates_per_step": config.updates_per_step,
            "temperature": config.rollout.temperature,
            "seed": config.seed,
            **optimizer,
            **algorithm,
        }


def measured_rank(config_file: str, num_steps: int, workload: "Workload") -> None:
    """Runs a rank of hacpo_mega in a process forked from the server: the steps, and a note of what they took."""
    imported_bytes = resident("VmRSS")
    from hacpo_lab.throughput.measured_trainer import measured_trainer

    config, marks = load_config(config_file), []
    with measured_trainer(config, workload) as trainer:
        for _ in range(num_steps):
            trainer.step()
            marks.append(time.process_time())
        note = config.run_dir.parent / f"{trainer.agent.name}.json"
    cpu_s = marks[-1] - marks[WARM_UP - 1]
    found = {"cpu_s": cpu_s, "peak_bytes": resident("VmHWM"), "imported_bytes": imported_bytes}
    note.write_text(json.dumps(found), encoding="utf-8")


def measure(machine: Machine, work: Path) -> dict[tuple[str, str], list[Turn]]:
    """The turns of every (work, trainer), one per round."""
    turns: dict[tuple[str, str], list[Turn]] = {}

    def add(what: str, trainer: str, turn: Turn) -> None:
        turns.setdefault((what, trainer), []).append(turn)
        print(f"{what}, {trainer}: {turn.wall_s:.2f} s, {turn.cpu_s:.2f} core-seconds", flush=True)

    names = [agent.name for agent in machine.config.agents]
    for number in range(machine.asked.rounds):
        folder, alone = work / f"round_{number + 1}", []
        for place, name in enumerate(names):
            add(name, OURS, machine.ours([place], folder / f"{name}.ours"))
            alone += machine.theirs([place], folder / f"{name}.theirs")
            add(name, THEIRS, alone[-1])
        if len(names) > 1:
            add("all", OURS, machine.ours(range(len(names)), folder / "ours"))
            add("all", IN_TURNS, in_turns(alone))
            add("all", AT_ONCE, at_once(machine.theirs(range(len(names)), folder / "theirs")))
    return turns


def _described(workload: "Workload") -> str:
    lengths = [tokens for step in workload.steps for group in step.values() for tokens, _ in group]
    if not lengths:
        return f"answers of {workload.tokens} tokens"
    return f"answers of {sum(lengths) / len(lengths):.1f} tokens in the mean, at most {max(lengths)}"


def main() -> None:
    """Measures, prints and writes the table. Exit 2 with a line per problem in the input, 1 when a trainer fails."""
    asked = arguments()
    try:
        config, peer_versions = checked(asked)
        from hacpo_lab.throughput.workload import drawn, fixed

        if asked.lengths is not None and asked.answer_tokens is not None:
            raise ValueError("--lengths and --answer-tokens both say how long answers are; give one")
        of_run = asked.lengths and drawn(config, asked.lengths, WARM_UP + asked.steps)
        workload = of_run or fixed(config, asked.answer_tokens)
    except ValueError as error:
        sys.exit(print(error, file=sys.stderr) or 2)
    # The user's, less PYTHONPATH: the folder `kernels` of this repository would shadow a package of theirs.
    peer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    prepare_environment()
    from hacpo_lab.experiments.result import this_machine
    from hacpo_mega.logbook.run.provenance import installed_versions, source_commit

    with tempfile.TemporaryDirectory(prefix="hacpo_peers_") as work:
        try:
            turns = measure(Machine(config, workload, asked, peer), Path(work))
        except (RuntimeError, ValueError) as error:
            sys.exit(str(error))
    machine = this_machine()
    facts = {
        "machine": f"{machine.cores} cores, {machine.cpu}; load at the end {os.getloadavg()[1]:.0f}",
        "commit": source_commit() or "unknown",
        "versions": ", ".join(f"{name} {version}" for name, version in installed_versions().items()),
        "TRL": peer_versions,
        "work": f"{_described(workload)}; rounds: {asked.rounds}, steps: {asked.steps} after {WARM_UP}",
        "threads": f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set: all cores, shared')}",
    }
    markdown = "\n".join(f"- {name}: {fact}" for name, fact in facts.items()) + "\n\n" + to_markdown(turns)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "peers.md").write_text(markdown, encoding="utf-8")
    print(f"\n{markdown}\nwritten to {asked.out}/peers.md")


if __name__ == "__main__":
    main()
