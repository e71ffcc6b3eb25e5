"""A model as the planner needs it, read from a config file or a registered name.

Units, parameters, work.

    embedding, layer.0 .. layer.{n-1}, head (final norm and output projection)

A tied output projection belongs to the embedding: its gradient is complete last and it is needed
first. The matrix multiplication it takes part in stays in the head. Nothing of transformers is
imported; known are configs with the keys of Llama (also Mistral, Qwen2, Qwen3), GPT-2 and BERT.
`models.py` takes others to transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hytrain_fx.config import Moments, Weights, in_shards, rest_on_host
from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.ir.named_files import json_object, read_text
from hytrain_fx.ir.states import ADAMW, MOMENTS, StateTable, StateTraffic

LARGEST = 10**9  # no config has a greater number, and products of three of them are still floats
Counted = Literal["tokens", "samples"]


@dataclass(frozen=True, slots=True)
class UnitShape:
    """One unit. `params` elements; `matmul_params` those that each token is multiplied with.

    `attention_width` is heads * head_dim of its attention (0 = none), `saved_values` the
    activations it keeps for the backward per token (16-bit values; of the known families as torch's
    min-cut partitioner keeps them, dropout left out), `output_values` what it hands on per token.
    """

    index: int
    name: str
    params: int
    matmul_params: int
    attention_width: int
    saved_values: int
    output_values: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Units in forward order.

    `context` is the longest sequence, in tokens; `causal` halves the attention's work.

    `autocast`: its weights are fp32 and run under autocast, so that the device has 16-bit copies of
    them. `counted` is what a micro-batch has many of: of images and recordings samples. `moments`
    is the dtype in which AdamW's two states rest: "fp32" or "bf16". `weights` says where 16-bit
    weights rest whose updates the CPU does: "resident", on the device, or "streamed", on the host.
    Of several ranks those of all updates may be "sharded", or "sharded_host".
    """

    name: str
    units: tuple[UnitShape, ...]
    context: int
    vocab: int
    causal: bool = True
    autocast: bool = False
    counted: Counted = "tokens"
    moments: Moments = "fp32"
    weights: Weights = "resident"

    @property
    def states(self) -> StateTable:
        """What an update keeps of a parameter.

        Raises UnsupportedError where `moments` is neither "fp32" nor "bf16".
        """
        return ADAMW.under({MOMENTS: self.moments})

    @property
    def state_bytes_per_param(self) -> int:
        """Master and states, on either side. Raises as `states`."""
        return self.states.bytes_per_param

    @property
    def traffic(self) -> StateTraffic:
        """What updates move of them. Raises as `states`."""
        return StateTraffic(self.state_bytes_per_param, self.states.tie is not None)

    @property
    def in_shards(self) -> bool:
        """Whether ranks keep weights in shards."""
        return in_shards(self.weights)

    @property
    def on_host(self) -> bool:
        """Whether weights that the CPU updates, or this rank's shards of them, rest on the host."""
        return rest_on_host(self.weights)

    @property
    def params(self) -> int:
        """All parameters, in elements."""
        return sum(u.params for u in self.units)

    @property
    def layers(self) -> int:
        """Length of the longest run of equal units with parameters to multiply by.

        They may save different activations. 0 where no unit has a neighbour like it.
        """
        begin, end = self._run()
        return end - begin if end - begin > 1 else 0

    def with_layers(self, layers: int) -> ModelShape:
        """This model with so many of its repeated layers.

        Raises ConfigError where none repeat, or for fewer than one.
        """
        begin, end = self._run()
        if not self.layers or layers < 1:
            raise ConfigError(f"found {layers} layers for {self.name!r}, which repeats {self.layers}; expected at least 1 of a model that "
                              "repeats some")
        stem = self.units[begin].name.rstrip("0123456789")
        first = int(self.units[begin].name.removeprefix(stem) or 0)
        # the first layer may save more: what all layers share
        run = (replace(self.units[end - 1], index=begin + i, name=f"{stem}{first + i}") for i in range(layers))
        after = (replace(u, index=begin + layers + i) for i, u in enumerate(self.units[end:]))
        return replace(self, units=(*self.units[:begin], *run, *after))

    def _run(self) -> tuple[int, int]:
        """Begin and end of that run."""
        runs, begin = [(0, 0)], 0
        for _, same in itertools.groupby(self.units, key=lambda u: replace(u, index=0, name="", saved_values=0)):
            count = len(list(same))
            if self.units[begin].matmul_params:
                runs.append((begin, begin + count))
            begin += count
        return max(runs, key=lambda run: run[1] - run[0])


@dataclass(frozen=True, slots=True)
class _Layers:
    """What the three families reduce to."""

    name: str
    layers: int
    hidden: int
    vocab: int
    context: int
    embedding_params: int
    layer_params: int
    layer_matmul_params: int
    head_params: int
    head_matmul_params: int
    attention_width: int
    saved_values: int
    causal: bool

    def shape(self) -> ModelShape:
        embedding = UnitShape(0, "embedding", self.embedding_params, 0, 0, 0, self.hidden)
        layers = tuple(UnitShape(1 + i, f"layer.{i}", self.layer_params, self.layer_matmul_params, self.attention_width,
                                 self.saved_values, self.hidden) for i in range(self.layers))
        # Logits are kept in 16 bit, and again in 32 bit for the loss: three 16-bit values each.
        head = UnitShape(1 + self.layers, "head", self.head_params, self.head_matmul_params, 0, 3 * self.vocab, self.vocab)
        return ModelShape(self.name, (embedding, *layers, head), self.context, self.vocab, self.causal)


def read_shape(source: str | Path | Mapping[str, Any]) -> ModelShape:
    """The shape of a registered name, of a `config.json`, or of the content of one.

    A path may also be the folder that holds the file.

    Raises ConfigError when the name or file is not known or a needed key is missing,
    UnsupportedError for another family.
    """
    return _from_config(*read_config(source))


def read_config(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The content of a `config.json` or of a registered name, and what to call its model.

    Raises ConfigError where there is no such file, or it is none.
    """
    if isinstance(source, Mapping):
        return source, str(source.get("_name_or_path") or source.get("model_type") or "model")
    if str(source) in (registered := registered_configs()):
        return registered[str(source)], str(source)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        names = ", ".join(sorted(registered))
        raise ConfigError(f"found neither a file {str(source)!r} nor a shape of that name; the names are {names}")
    try:
        config = json_object(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not a model's config.json: {error}") from error
    named = path.parent.name if path.name == "config.json" else path.stem
    return config, str(config.get("_name_or_path") or named or path.stem)


def registered_configs() -> dict[str, Mapping[str, Any]]:
    """Configs known by name.

    `llama-3.1b` and `llama-7b` are the models measured with 4 x 2048 tokens. `moe-30b` has the
    sizes of Qwen3-30B-A3B, `moe-70b` wider layers of the same kind; transformers reads both.
    """
    widths = {  # hidden, layers, intermediate, heads, key-value heads
        "llama-1.3b": (2048, 24, 5504, 16, 16),
        "llama-3.1b": (3072, 26, 8192, 24, 24),
        "llama-7b": (4096, 32, 11008, 32, 32),
        "llama-10b": (4096, 48, 11008, 32, 32),
        "llama-30b": (6656, 60, 17920, 52, 52),
        "llama-70b": (8192, 80, 28672, 64, 8),
    }
    keys = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    common = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
    experts = {
        "model_type": "qwen3_moe", "vocab_size": 151936, "max_position_embeddings": 4096, "head_dim": 128, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "tie_word_embeddings": False}
    sparse = {"moe-30b": (2048, 768), "moe-70b": (3072, 1216)}  # hidden, one expert's intermediate
    return {
        **{name: {**common, **dict(zip(keys, width, strict=True))} for name, width in widths.items()},
        **{name: {**experts, "hidden_size": hidden, "moe_intermediate_size": inner, "intermediate_size": 8 * inner}
           for name, (hidden, inner) in sparse.items()},
    }


def _from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    family = str(config.get("model_type", ""))
    experts = [key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)]
    if experts:
        raise UnsupportedError(f"the config has {experts[0]}={config[experts[0]]}: mixtures of experts are not known here")
    numbers = _Numbers(config, name)
    if family == "gpt2" or "n_embd" in config:
        return _gpt2(numbers, name).shape()
    if family in ("bert", "roberta") or "type_vocab_size" in config:
        return _bert(numbers, name).shape()
    if family in ("llama", "mistral", "qwen2", "qwen3", "") and "hidden_size" in config:
        return _llama(numbers, name, family).shape()
    found = f"model_type {config['model_type']!r} is not known here" if family else f"the config of {name!r} has no model_type"
    raise UnsupportedError(f"{found}; expected llama, mistral, qwen2, qwen3, gpt2 or bert. package.module:factory takes any model")


class _Numbers:
    """The values of a config by key. Raises ConfigError where one is missing, or is none."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config = config
        self._name = name

    def __getitem__(self, key: str) -> int:
        if key not in self._config:
            raise ConfigError(f"the config of {self._name!r} has no key {key!r}; found {', '.join(sorted(self._config))}")
        return self._whole(key, self._config[key], 1)

    def get(self, key: str, otherwise: int, least: int = 1) -> int:
        """A number that may be left out, or null."""
        value = self._config.get(key)
        return otherwise if value is None else self._whole(key, value, least)

    def says(self, key: str, otherwise: bool) -> bool:
        """A switch that may be left out."""
        return bool(self._config.get(key, otherwise))

    def _whole(self, key: str, value: object, least: int) -> int:
        if type(value) is not int or not least <= value <= LARGEST:
            raise ConfigError(f"the config of {self._name!r} has {key}={value!r}; expected a whole number >= {least} and <= {LARGEST}")
        return value


def _llama(c: _Numbers, name: str, family: str) -> _Layers:
    hidden, inner, heads, vocab = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["vocab_size"]
    head_dim = c.get("head_dim", hidden // heads)
    width, kv_width = heads * head_dim, c.get("num_key_value_heads", heads) * head_dim
    matmul = 2 * hidden * width + 2 * hidden * kv_width + 3 * hidden * inner
    qkv_bias = family == "qwen2" or c.says("attention_bias", False)
    bias = (width + 2 * kv_width if qkv_bias else 0) + (hidden if c.says("attention_bias", False) and family != "qwen2" else 0)
    bias += 2 * inner + hidden if c.says("mlp_bias", False) else 0
    norms = 2 * hidden + (2 * head_dim if family == "qwen3" else 0)
    tied = c.says("tie_word_embeddings", False)
    return _Layers(
        name, c["num_hidden_layers"], hidden, vocab, c.get("max_position_embeddings", 2048),
        embedding_params=vocab * hidden, layer_params=matmul + bias + norms, layer_matmul_params=matmul,
        head_params=hidden + (0 if tied else vocab * hidden), head_matmul_params=vocab * hidden,
        attention_width=width, saved_values=4 * hidden + 2 * width + 2 * kv_width + 3 * inner, causal=True)


def _gpt2(c: _Numbers, name: str) -> _Layers:
    hidden, vocab, context = c["n_embd"], c["vocab_size"], c["n_positions"]
    inner = c.get("n_inner", 4 * hidden)
    matmul = 4 * hidden * hidden + 2 * hidden * inner
    tied = c.says("tie_word_embeddings", True)
    return _Layers(
        name, c["n_layer"], hidden, vocab, context,
        embedding_params=(vocab + context) * hidden, layer_params=matmul + 9 * hidden + inner, layer_matmul_params=matmul,
        head_params=2 * hidden + (0 if tied else vocab * hidden), head_matmul_params=vocab * hidden,
        attention_width=hidden, saved_values=8 * hidden + 3 * inner, causal=True)


def _bert(c: _Numbers, name: str) -> _Layers:
    hidden, inner, vocab, context = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["max_position_embeddings"]
    matmul = 4 * hidden * hidden + 2 * hidden * inner
    tied = c.says("tie_word_embeddings", True)
    transform = hidden * hidden + 3 * hidden
    return _Layers(
        name, c["num_hidden_layers"], hidden, vocab, context,
        embedding_params=(vocab + context + c.get("type_vocab_size", 2, least=0) + 2) * hidden,
        layer_params=matmul + 9 * hidden + inner, layer_matmul_params=matmul,
        head_params=transform + vocab + (0 if tied else vocab * hidden + vocab), head_matmul_params=(vocab + hidden) * hidden,
        attention_width=hidden, saved_values=8 * hidden + 2 * inner, causal=False)
