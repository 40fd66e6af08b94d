"""Rank map: the place of every process of a job, as pure arithmetic on ranks, without torch and communication.

    global rank = first rank of its agent + agent rank            agents own contiguous blocks, in configuration order
    agent rank  = cell * (tp * cp * pp) + (pp_rank * cp + cp_rank) * tp + tp_rank     cells are contiguous, tensor ranks
                                                                  are neighbours, then those of a sequence
    cell        = lane * cells_per_lane + cell_in_lane            a cell is one replica; its first rank is the leader
    block       = cell // block_cells                             cells that share experts; mostly one

With placement = "apart" a cell also has ranks that only answer, after those that train: its engines run on them, in the
order of ranks. An agent's ranks that train and its ranks that only answer are two worlds, each counted from 0.

It lives beside place.py, which needs torch, so that `hacpo-mega check` and the launchers can ask for the number of
processes in well under a second. Megatron is told the same order of ranks in megatron/actor.py.
Elsewhere: process groups (groups/job_groups.py) and which node a rank runs on (the launcher's business).
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from hacpo_mega.cluster.launcher_env import size_variable
from hacpo_mega.config import Config
from hacpo_mega.models.files.visible import columns
from hacpo_mega.models.sharding.layout import block_cells

TABLE_WIDTH, NAME_WIDTH = 80, 20  # characters of a line of the table, of a name in it


@dataclass(frozen=True)
class AgentShape:
    """The parallel layout of one agent.

    engine_tp   ranks of one vLLM engine
    rollout     ranks of a cell that only answer, behind those that train; 0: all ranks do both
    ep          ranks that share experts, of one cell or of a block of neighbouring ones
    """

    name: str
    tp: int = 1
    pp: int = 1
    cells_per_lane: int = 1
    engine_tp: int = 1
    cp: int = 1
    rollout: int = 0
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.cp, self.pp, self.cells_per_lane, self.engine_tp) < 1:
            raise ValueError(
                f"agent {self.name}: tp, cp, pp, cells_per_lane and engine_tp must be at least 1, got {self}"
            )
        if self.answering % self.engine_tp:
            nearest = max(size for size in range(1, self.engine_tp + 1) if self.answering % size == 0)
            has = f"rollout_gpus {self.rollout}" if self.rollout else f"{self.product} = {self.cell_size} ranks"
            raise ValueError(
                f"agent {self.name}: a cell has {has}, which engines of engine_tp {self.engine_tp} do not fill. "
                f"Nearest: {nearest}"
            )

    @property
    def training(self) -> int:
        """Ranks of a cell that train."""
        return self.tp * self.cp * self.pp

    @property
    def answering(self) -> int:
        """Ranks of a cell that its engines run on: those that only answer, else those that train."""
        return self.rollout or self.training

    @property
    def cell_size(self) -> int:
        """All ranks of a cell."""
        return self.training + self.rollout

    @property
    def block_cells(self) -> int:
        """Cells of a block."""
        return block_cells(self.ep, self.tp, self.cp)

    @property
    def block_size(self) -> int:
        """All ranks of a block."""
        return self.block_cells * self.cell_size

    @property
    def product(self) -> str:
        """The arithmetic of a cell's ranks, for tables and messages."""
        context = f"cp {self.cp} x " if self.cp > 1 else ""
        layout = f"tp {self.tp} x {context}pp {self.pp}"
        return f"({layout} + {self.rollout} that answer)" if self.rollout else layout

    @property
    def engines_per_cell(self) -> int:
        return self.answering // self.engine_tp


@dataclass(frozen=True)
class Coordinate:
    """The place of one process. `agent` is an index, `cell` counts over the agent's row, `engine` inside the cell.

    trains, answers   whether it has a part of the actor, of an engine. pp, cp and tp rank are 0 where it does not
                      train, engine and engine rank where it does not answer
    world_rank        its rank among those of its agent with the same role
    block, block_rank     number of the block of cells that share experts, and its rank among all of theirs
    """

    global_rank: int
    agent: int
    agent_name: str
    agent_rank: int
    lane: int
    cell: int
    cell_in_lane: int
    cell_rank: int
    pp_rank: int
    cp_rank: int
    tp_rank: int
    engine: int
    engine_rank: int
    trains: bool = True
    answers: bool = True
    world_rank: int = 0
    block: int = 0
    block_rank: int = 0

    @property
    def is_leader(self) -> bool:
        """True if this process speaks for its cell."""
        return self.cell_rank == 0

    @property
    def is_first_to_answer(self) -> bool:
        """True if it is the first rank of the cell's first engine, which times how it answers."""
        return self.is_engine_leader and self.engine == 0

    @property
    def is_engine_leader(self) -> bool:
        """True if it is the first rank of an engine, all of whose ranks have equal answers."""
        return self.answers and self.engine_rank == 0

    def __str__(self) -> str:
        cell = f"agent {self.agent_name}, lane {self.lane}, cell {self.cell_in_lane}"
        if not self.trains:
            return f"rank {self.global_rank} ({cell}, engine {self.engine}, its rank {self.engine_rank})"
        context = f"cp {self.cp_rank}, " if self.cp_rank else ""
        return f"rank {self.global_rank} ({cell}, pp {self.pp_rank}, {context}tp {self.tp_rank})"


@dataclass(frozen=True)
class RankMap:
    """All processes of a job. A look-up costs O(number of agents), whatever the number of ranks.

    shares_devices   whether agents take turns on the devices of one node: rank r of each agent is on device r
    """

    lanes: int
    agents: tuple[AgentShape, ...]
    shares_devices: bool = False

    def __post_init__(self) -> None:
        if self.lanes < 1 or not self.agents:
            raise ValueError(f"a job needs at least one lane and one agent, got {self.lanes} and {len(self.agents)}")

    @classmethod
    def of(cls, config: Config) -> "RankMap":
        """The map of a configuration."""
        shapes = (
            AgentShape(
                name=agent.name,
                tp=agent.tp,
                pp=agent.pp,
                cells_per_lane=agent.cells_per_lane,
                engine_tp=agent.engine_tensor_parallel,
                cp=agent.cp,
                rollout=agent.rollout_gpus or 0,
                ep=agent.ep,
            )
            for agent in config.agents
        )
        return cls(config.lanes, tuple(shapes), config.mode.takes_turns)

    def require_world_size(self, found: int) -> None:
        """Raises ValueError, with the arithmetic, if a job was started with another number of processes."""
        if found != self.world_size:
            variable = size_variable()
            inside = "" if variable == "WORLD_SIZE" else ", which a Slurm job has set for this shell"
            raise ValueError(
                f"this configuration needs {self.world_size} ranks ({self.arithmetic()}), found {variable} {found}"
                f"{inside}. Start it with launch/local.sh, or with as many processes as needed."
            )

    def require_one_node(self, num_local: int) -> None:
        """Raises ValueError where agents take turns and not all processes are among the `num_local` of this node."""
        if self.shares_devices and num_local != self.world_size:
            raise ValueError(
                f"placement = 'shared' is for the devices of one node, and {num_local} of the {self.world_size} "
                "processes are on this one: start all of them on one node, or say placement = 'split'"
            )

    @property
    def num_devices(self) -> int:
        """Devices of the job: one for every process, or as many as the largest agent has where they take turns."""
        sizes = [self.agent_world_size(agent) for agent in range(len(self.agents))]
        return max(sizes) if self.shares_devices else sum(sizes)

    def device_number(self, rank: int, local_rank: int) -> int:
        """Number of a rank's device on its node: its `local_rank` there."""
        return self.coordinate(rank).agent_rank if self.shares_devices else local_rank

    def agent_world_size(self, agent: int) -> int:
        """Ranks of one agent over all lanes."""
        return self.lanes * self.agents[agent].cells_per_lane * self.agents[agent].cell_size

    def role_world_size(self, who: Coordinate) -> int:
        """Ranks of the agent with the same role as `who`: the size of its default process group."""
        shape = self.agents[who.agent]
        return self.lanes * shape.cells_per_lane * (shape.training if who.trains else shape.rollout)

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """The first global rank of every agent, and the world size at the end."""
        sizes = (self.agent_world_size(agent) for agent in range(len(self.agents)))
        return tuple(accumulate(sizes, initial=0))

    @property
    def world_size(self) -> int:
        return self.first_ranks[-1]

    def coordinate(self, global_rank: int) -> Coordinate:
        """The place of a global rank. Raises ValueError outside [0, world_size)."""
        if not 0 <= global_rank < self.world_size:
            raise ValueError(f"rank {global_rank} is outside this job of {self.world_size} ranks: {self.arithmetic()}")
        agent = bisect_right(self.first_ranks, global_rank) - 1
        shape = self.agents[agent]
        agent_rank = global_rank - self.first_ranks[agent]
        cell, cell_rank = divmod(agent_rank, shape.cell_size)
        block, block_rank = divmod(agent_rank, shape.block_size)
        lane, cell_in_lane = divmod(cell, shape.cells_per_lane)
        trains = cell_rank < shape.training
        replica, tp_rank = divmod(cell_rank if trains else 0, shape.tp)
        pp_rank, cp_rank = divmod(replica, shape.cp)
        answers = not (trains and shape.rollout)
        role_rank = cell_rank - shape.training * (not trains)
        engine, engine_rank = divmod(role_rank if answers else 0, shape.engine_tp)
        return Coordinate(
            global_rank=global_rank,
            agent=agent,
            agent_name=shape.name,
            agent_rank=agent_rank,
            lane=lane,
            cell=cell,
            cell_in_lane=cell_in_lane,
            cell_rank=cell_rank,
            pp_rank=pp_rank,
            cp_rank=cp_rank,
            tp_rank=tp_rank,
            engine=engine,
            engine_rank=engine_rank,
            trains=trains,
            answers=answers,
            world_rank=cell * (shape.training if trains else shape.rollout) + role_rank,
            block=block,
            block_rank=block_rank,
        )

    def leader_of(self, agent: int, lane: int, cell_in_lane: int = 0) -> int:
        """The first global rank of a cell."""
        shape = self.agents[agent]
        return self.first_ranks[agent] + (lane * shape.cells_per_lane + cell_in_lane) * shape.cell_size

    def leaders(self, lane: int) -> list[int]:
        """Global ranks of the leaders of a lane, by agent, then by cell: the senders of an exchange, in its order."""
        return [
            self.leader_of(agent, lane, cell)
            for agent, shape in enumerate(self.agents)
            for cell in range(shape.cells_per_lane)
        ]

    def share_of_lane(self, who: Coordinate) -> slice:
        """A cell's part of its lane's prompts, to answer and to train on: every cells_per_lane-th from its own on."""
        return slice(who.cell_in_lane, None, self.agents[who.agent].cells_per_lane)

    def share_of_agent(self, who: Coordinate) -> slice:
        """A cell's part of a list that all cells of an agent share, such as prompts of an evaluation."""
        return slice(who.cell, None, self.lanes * self.agents[who.agent].cells_per_lane)

    def engine_with(self, agent: int, who: Coordinate, number: int, per_prompt: int, *, in_lane: bool) -> int:
        """First global rank of the engine of `agent` that takes part in the `number`-th answer of `who`'s engine.

        Both agents give `per_prompt` answers to each prompt of a list that the cells of their lane share (`in_lane`),
        or all their cells; the engines of a cell take every n-th answer.
        """
        mine = self.share_of_lane(who) if in_lane else self.share_of_agent(who)
        prompt, answer = divmod(who.engine + number * self.agents[who.agent].engines_per_cell, per_prompt)
        position, theirs = mine.start + prompt * mine.step, self.agents[agent]
        if in_lane:
            prompt, cell = divmod(position, theirs.cells_per_lane)
            lane = who.lane
        else:
            prompt, cell = divmod(position, self.lanes * theirs.cells_per_lane)
            lane, cell = divmod(cell, theirs.cells_per_lane)
        engine = (prompt * per_prompt + answer) % theirs.engines_per_cell
        leader = self.leader_of(agent, lane, cell)
        return leader + theirs.cell_size - theirs.answering + engine * theirs.engine_tp

    def arithmetic(self) -> str:
        """The arithmetic of the world size, for error messages."""
        terms = (
            f"{shape.name}: {self.lanes} lanes x {shape.cells_per_lane} cells x {shape.product} = "
            f"{self.agent_world_size(agent)}"
            for agent, shape in enumerate(self.agents)
        )
        return "; ".join(terms)

    def table(self, max_lanes: int = 8) -> str:
        """The job as text: a row per agent, a column per lane, the global ranks of its cells inside.

        As many lanes as TABLE_WIDTH holds, at most `max_lanes`; beyond them the middle is left out, so the table of
        100,000 ranks still fits a screen.
        """
        for num_shown in range(min(self.lanes, max_lanes), 0, -1):
            lanes = [*range(num_shown)]
            if self.lanes > num_shown:
                lanes = [*range(max(1, num_shown - 1)), -1, self.lanes - 1]  # -1: those left out
            header = ["", *("..." if lane < 0 else f"lane {lane}" for lane in lanes)]
            rows = [header, *(list(self._table_row(agent, lanes)) for agent in range(len(self.agents)))]
            lines = columns(rows)
            if max(map(len, lines)) <= TABLE_WIDTH:
                break
        turns = f"; agents take turns on {self.num_devices} devices" if self.shares_devices else ""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return "\n".join([f"{ranks} in {self.lanes} lane{'s' * (self.lanes > 1)}{turns}", *lines])

    def _table_row(self, agent: int, lanes: list[int]) -> Iterator[str]:
        shape = self.agents[agent]
        layout = shape.product.replace(" x ", ", ").strip("()")
        name = shape.name if len(shape.name) <= NAME_WIDTH else f"{shape.name[: NAME_WIDTH - 3]}..."
        engines = f"{shape.engines_per_cell} engine{'s' * (shape.engines_per_cell > 1)} of {shape.engine_tp}"
        yield f"{name} ({layout}, {engines})"
        for lane in lanes:
            if lane < 0:
                yield "..."
                continue
            first = self.leader_of(agent, lane)
            last = first + shape.cells_per_lane * shape.cell_size - 1
            span = f"{first}" if first == last else f"{first}-{last}"
            yield span if shape.cells_per_lane == 1 else f"{span} in {shape.cells_per_lane} cells"
