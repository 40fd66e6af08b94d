"""Fields of a model's config.json that no run acts on, as lines for people. Imports no torch.

Not here: what is refused (models/families/families.py).
"""

from collections.abc import Iterator

from hacpo_mega.config.tables.schema import Config
from hacpo_mega.models.files.folder import PREDICTS, read_json
from hacpo_mega.models.sharding.megatron_fields import AUX_LOSS

UNUSED = {
    "router_aux_loss_coef": "megatron.moe_aux_loss_coeff alone switches on the loss that evens the load of experts",
    **dict.fromkeys(PREDICTS, "layers that predict further tokens are not loaded, trained or exported"),
}


def unused_fields(config: Config) -> Iterator[str]:
    """A line for each such field of an agent's folder, if it has one."""
    for agent in config.agents:
        fields = read_json(agent.model / "config.json")
        for name in UNUSED.keys() & fields.keys():
            if fields[name] and not (name == "router_aux_loss_coef" and agent.megatron.get(AUX_LOSS)):
                yield f"{agent.name}: config.json has {name} = {fields[name]!r}, which is not used: {UNUSED[name]}"
