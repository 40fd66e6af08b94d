"""A model's architecture as its Hugging Face config.json describes it, one frozen record. No weights, no Megatron.

Elsewhere: the folder's other files (folder.py, weight_files.py) and over how many ranks a model spreads (layout.py).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from hacpo_mega.models.families.delta_net import DeltaNet, read_delta_net
from hacpo_mega.models.families.experts import read_feed_forward, routing_problem
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.families.family import Family
from hacpo_mega.models.families.heads import Heads, read_heads
from hacpo_mega.models.families.latent import Latent, read_latent
from hacpo_mega.models.families.rope import Rope, YarnRope, read_nope_layers, read_rope
from hacpo_mega.models.families.windows import read_windows
from hacpo_mega.models.files.documents import one_line, short
from hacpo_mega.models.files.fields import MOST, Fields
from hacpo_mega.models.files.folder import read_config
from hacpo_mega.models.files.weight_files import FP8_BLOCK

# Fields that quantization_config must have for matrices that are read packed (Family.packs).
PACKED: Mapping[str, Mapping[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]},
}
# vLLM's field of config.json for the scale of queries, which transformers has in the rope table.
SCALING = "llama_4_scaling"


@dataclass(frozen=True)
class Architecture:
    """A decoder with rotary positions, RMSNorm, a gated feed-forward or experts, and grouped key/value heads.

    ffn_size            width of a feed-forward; 0 where every layer has experts in its place
    num_experts         of a layer; 0: none
    experts_per_token   experts that a token goes to
    expert_ffn          width of an expert
    normalises_experts  whether the weights of a token's experts are made to add up to 1
    num_groups          groups of experts; groups_per_token: how many of them a token's experts may be in
    routed_scale        factor on the weights of a token's experts
    shared_ffn          width of the feed-forward that all tokens go to beside their experts; 0: none
    dense_layers        how many layers, the first ones, have a feed-forward and no experts
    nope_layers         layers without rotary positions (NoPE)
    latent              sizes of latent attention; None: plain attention
    delta_net           sizes of the delta net that some layers have in place of attention; delta_layers: which layers
    full_heads          key/value heads of layers without a window, where these differ from the others (heads.py)
    softcap             logits z are c tanh(z / c), with this c; None: z
    Raises ValueError for sizes that no such decoder has.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope: Rope | None
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    rotary_share: float = 1.0
    windows: tuple[int | None, ...] = ()
    window_theta: float | None = None
    query_scalar: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalises_experts: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    routed_scale: float = 1.0
    shared_ffn: int = 0
    dense_layers: int = 0
    nope_layers: tuple[int, ...] = ()
    latent: Latent | None = None
    delta_net: DeltaNet | None = None
    delta_layers: tuple[bool, ...] = ()
    full_heads: Heads | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} is more than {most:,}, which no model has")
        for heads in self.kinds_of_heads:
            if self.num_heads % heads.kv_heads:
                raise ValueError(
                    f"{self.num_heads} attention heads cannot share {heads.kv_heads} key/value heads evenly: "
                    "the first number must be a multiple of the second"
                )
            if heads.size % 2:
                raise ValueError(f"head_dim {heads.size} is odd; rotary positions turn pairs of numbers")
        choice = self.num_experts, self.experts_per_token, self.num_groups, self.groups_per_token
        key = self.traits.experts.per_token if self.traits.experts is not None else ""
        if problem := routing_problem(*choice, key=key):
            raise ValueError(problem)
        if self.has_experts and self.dense_layers >= self.num_layers:
            raise ValueError(
                f"first_k_dense_replace is {self.dense_layers}, and there are {self.num_layers} layers: none of them "
                "would have experts"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"partial_rotary_factor {self.rotary_share} turns {self.rotary_dim} of the {self.head_dim} numbers of "
                "a head; rotary positions turn pairs of numbers"
            )
        if isinstance(self.rope, YarnRope) and self.max_positions > self.rope.reach:
            raise ValueError(
                f"max_position_embeddings ({self.max_positions}) is beyond the {self.rope.reach} positions for which "
                "vLLM has angles, original_max_position_embeddings x factor; write that or fewer"
            )

    @property
    def traits(self) -> Family:
        """Properties that all models of its family share."""
        return FAMILIES[self.family]

    @property
    def angle_size(self) -> int:
        """Number of rotary angles per token, all layers together."""
        more = self.rotary_dim if self.window_theta is not None or self.query_beta else 0
        return self.full_rotary_dim + more

    @property
    def query_beta(self) -> float:
        """Growth of queries with their position (YarnRope); 0: none."""
        return self.rope.query_beta if isinstance(self.rope, YarnRope) else 0.0

    @property
    def vllm_overrides(self) -> dict[str, Any]:
        """Fields of config.json with which vLLM runs the text model as training does."""
        fields = {"architectures": [self.traits.architecture], "tie_word_embeddings": self.tied}
        if self.traits.vllm_fields:
            fields |= self.traits.only
            fields |= {name: getattr(self, field) for name, field in self.traits.vllm_fields.items()}
        if isinstance(self.rope, YarnRope) and self.rope.query_beta:
            original = self.rope.original_positions
            fields[SCALING] = {"original_max_position_embeddings": original, "beta": self.rope.query_beta}
        return fields

    @property
    def rope_table(self) -> dict[str, Any]:
        """Fields that vLLM's gpt-oss needs in a YaRN table, and that the table may leave out."""
        assert isinstance(self.rope, YarnRope), self.family
        return {"beta_fast": self.rope.beta_fast, "beta_slow": self.rope.beta_slow}

    @property
    def gated(self) -> bool:
        """True if attention has a gate on its output, a number per query."""
        return self.traits.gated_attention

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.num_layers - sum(self.delta_layers)

    def has_delta_net_in(self, layer: int) -> bool:
        """True if this layer has a delta net in the place of attention."""
        return bool(self.delta_layers) and self.delta_layers[layer]

    @property
    def fits_te(self) -> bool:
        """True if it can have TransformerEngine's layers."""
        return self.traits.fits_te and not self.windows

    @property
    def softmax_scale(self) -> float | None:
        """Factor on attention scores; None: one over the root of the head size."""
        if self.latent is not None and isinstance(self.rope, YarnRope):
            return self.head_dim**-0.5 * self.rope.score_factor
        return None if self.query_scalar is None else self.query_scalar**-0.5

    @cached_property
    def kinds_of_heads(self) -> tuple[Heads, ...]:
        """Key/value heads of layers with a window, and then those of layers without one, if these differ."""
        return (Heads(self.num_kv_heads, self.head_dim), *((self.full_heads,) if self.full_heads is not None else ()))

    def heads_in(self, layer: int) -> Heads:
        """Key/value heads of an attention layer."""
        return self.kinds_of_heads[-1 if self.window_of(layer) is None else 0]

    @cached_property
    def attention_heads(self) -> tuple[Heads, ...]:
        """Key/value heads of every layer with attention, in order."""
        return tuple(self.heads_in(layer) for layer in range(self.num_layers) if not self.has_delta_net_in(layer))

    def window_of(self, layer: int) -> int | None:
        """Number of tokens that a layer attends to, the token itself included; None: all."""
        return self.windows[layer] if self.windows else None

    @property
    def copies_qk_norm(self) -> bool:
        """True if every tensor-parallel rank holds the whole norm of queries and of keys."""
        return self.qk_norm and not self.traits.whole_qk_norm

    @property
    def has_experts(self) -> bool:
        """True if some of its layers have experts in place of a feed-forward."""
        return self.num_experts > 0

    @property
    def gates_shared(self) -> bool:
        """True if its shared experts have a gate, a number per token."""
        return self.has_experts and self.traits.experts.shared_gate is not None

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - self.dense_layers if self.has_experts else 0

    def has_experts_in(self, layer: int) -> bool:
        """True if this layer has experts."""
        return self.has_experts and layer >= self.dense_layers

    def kinds(self, layers: range | tuple[int, ...]) -> Mapping["Architecture", int]:
        """One-layer models, one for each kind of layer among `layers`, with the number of layers of that kind.

        Kinds differ in experts, delta net or attention, and key/value heads.
        """
        if layers not in self._kinds:
            self._kinds[layers] = self._kinds_among(layers)
        return self._kinds[layers]

    @cached_property
    def _kinds(self) -> dict[range | tuple[int, ...], Mapping["Architecture", int]]:
        """Cache of `kinds`, which a search for layouts calls thousands of times with equal arguments."""
        return {}

    def _kinds_among(self, layers: range | tuple[int, ...]) -> dict["Architecture", int]:
        def kind(layer: int) -> tuple[bool, bool, tuple[int | None, ...]]:
            # Without heads of their own, layers with and without a window count as one kind.
            windows = self.windows if self.full_heads is None else (self.window_of(layer),)
            return self.has_experts_in(layer), self.has_delta_net_in(layer), windows

        counts = Counter(map(kind, layers))
        sparse = replace(self, num_layers=1, dense_layers=0)
        dense = replace(sparse, num_experts=0, experts_per_token=0, expert_ffn=0, shared_ffn=0, num_groups=1,
                        groups_per_token=1)  # fmt: skip
        return {
            replace(
                sparse if has_experts else dense,
                delta_layers=(has_delta,) if self.delta_layers else (),
                windows=windows,
            ): count
            for (has_experts, has_delta, windows), count in counts.items()
        }

    @property
    def interleaved(self) -> bool:
        """True if rotary pairs are interleaved (GPT-J style) instead of half-split (NeoX style)."""
        return self.traits.interleaved

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head with rotary positions: the first ones, or with latents the last."""
        return int((self.head_dim if self.latent is None else self.latent.rope_dim) * self.rotary_share)

    @property
    def cached_dim(self) -> int:
        """Numbers per token in an engine's cache: of one head or, with latents, of all heads together."""
        return self.head_dim if self.latent is None else self.latent.cached

    @property
    def value_dim(self) -> int:
        """Size of a head's value, and of attention's output of a head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def full_rotary_dim(self) -> int:
        """Dimensions of a head with rotary positions in layers without a window."""
        return self.rotary_dim if self.full_heads is None else int(self.full_heads.size * self.rotary_share)

    @classmethod
    def of_family(
        cls, family: Family, *, attention_bias: bool = False, use_qk_norm: bool = False, **sizes: Any
    ) -> "Architecture":
        """A member of a family by its sizes, the fields above by name; both others as in its config.json."""
        return cls(
            family=family.model_type,
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias and family.output_bias,
            qk_norm=use_qk_norm if family.qk_norm is None else family.qk_norm,
            **sizes,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Architecture":
        """Read `folder`/config.json, of an image checkpoint the text model alone.

        Raises ValueError for a folder without one or a model this project cannot run.
        """
        return cls.from_config(Path(folder) / "config.json", read_config(Path(folder)))

    @classmethod
    def from_config(cls, path: Path, given: Mapping[str, Any]) -> "Architecture":
        """The same from the fields of a config.json, which messages call `path`."""
        family = _family(path, given)
        _refuse_variants(path, given, family)
        fields = Fields(path, given, family.defaults)
        hidden_size = fields.count("hidden_size", most=MOST["hidden_size"])
        num_heads = fields.count("num_attention_heads", most=MOST["num_heads"])
        num_layers = fields.count("num_hidden_layers", most=MOST["num_layers"])
        angles = read_rope(path, fields, family)
        delta_net = read_delta_net(path, fields, family, num_layers)
        latent = read_latent(fields, family, num_heads)
        windows = read_windows(path, fields, family, num_layers)
        if latent is not None:
            num_kv_heads, head_dim = num_heads, latent.head_dim
        else:
            num_kv_heads = fields.count("num_key_value_heads", default=num_heads, most=MOST["num_kv_heads"])
            head_dim = fields.count("head_dim", default=hidden_size // num_heads, most=MOST["head_dim"])
        try:
            return cls.of_family(
                family,
                num_layers=num_layers,
                hidden_size=hidden_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                latent=latent,
                **read_feed_forward(fields, family.experts),
                vocab_size=fields.count("vocab_size", most=MOST["vocab_size"]),
                max_positions=fields.count("max_position_embeddings", most=MOST["max_positions"]),
                norm_eps=fields.positive("rms_norm_eps", default=1e-6),
                **angles,
                windows=windows,
                nope_layers=read_nope_layers(path, fields, family, num_layers),
                **delta_net,
                query_scalar=_query_scalar(fields, family),
                full_heads=read_heads(path, fields, family, windows or (None,) * num_layers, (num_kv_heads, head_dim)),
                softcap=fields.positive("final_logit_softcapping")
                if family.softcap and given.get("final_logit_softcapping") is not None
                else None,
                tied=fields.flag("tie_word_embeddings", default=False),
                attention_bias=fields.flag("attention_bias", default=False),
                use_qk_norm=fields.flag("use_qk_norm", default=False),
            )
        except ValueError as error:
            message = str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
            raise ValueError(message) from error


def _query_scalar(fields: Fields, family: Family) -> int | None:
    """The number whose root divides attention scores in place of the head size's; None: the head size."""
    if family.query_scalar is True:
        return fields.count("query_pre_attn_scalar")
    return family.query_scalar or None


def _family(path: Path, given: Mapping[str, Any]) -> Family:
    """The family that a config.json names by its model_type, and its `architectures` in the same way."""
    classes = [name for family in FAMILIES.values() for name in (family.architecture, family.image_class) if name]
    supported = list(dict.fromkeys(classes))
    architectures = given.get("architectures")
    name = one_line(str(architectures[0])) if isinstance(architectures, list) and architectures else "none given"
    model_type = given.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    for field, value, known in (("architecture", name, supported), ("model_type", model_type, list(FAMILIES))):
        if value not in known:
            (nearest,) = get_close_matches(str(value), known, n=1, cutoff=0.0)
            shown = value if field == "architecture" else short(value)
            raise ValueError(
                f"{path}: {field} {shown} is not supported; nearest: {nearest}; supported: {', '.join(known)}. "
                "CONTRIBUTING.md, Add a model family, says how to add one"
            )
    assert family is not None, model_type
    if name not in (family.architecture, family.image_class):
        raise ValueError(
            f"{path}: model_type {model_type!r} goes with architecture {family.architecture}, found {name}"
        )
    return family


def _refuse_variants(path: Path, given: Mapping[str, Any], family: Family) -> None:
    """ValueError for a model that computes something else than its family, or has a field that may ask for it."""
    for key, only in family.values.items():
        value = given.get(key)
        # true == 1 in Python, but 1 is no flag
        is_other = value is not None and (value != only or isinstance(value, bool) != isinstance(only, bool))
        if is_other or (key not in given and family.new_config_fields.get(key) is not None):
            reason = f" with {family.model_type}: {family.why[key]}" if key in family.why else f", only {only!r}"
            raise ValueError(f"{path}: {key} = {short(value)} is not supported{reason}")
    packed, known = given.get("quantization_config"), PACKED.get(family.packs or "", {})
    if packed and (not isinstance(packed, dict) or any(packed.get(key) != value for key, value in known.items())):
        only = " and ".join(f"{key} {value}" for key, value in known.items())
        raise ValueError(
            f"{path}: quantization_config = {short(packed)} is not supported with {family.model_type}, only {only}"
        )
    if unknown := sorted(key for key, value in given.items() if value is not None and not family.knows(key)):
        raise ValueError(
            f"{path}: {one_line(unknown[0])} = {short(given[unknown[0]])} is no field of {family.model_type} that is "
            "known here, so the model may compute something else; if it does not, take it out of config.json"
        )
