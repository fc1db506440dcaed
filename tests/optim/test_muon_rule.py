"""Which parameters go to Muon, by the names of models of today, and the table that says so."""

from typing import Any

import pytest
import torch
from refusals import refuse
from torch import nn

from dgc.optim import MuonGroups, muon_groups

pytestmark = pytest.mark.usefixtures("no_type_checks")
SQUARE, WIDE, TALL = (16, 16), (4, 16), (48, 16)


def model_of(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A module with parameters of these names, without values."""
    model = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = model
        for word in path:
            if not hasattr(module, word):
                module.add_module(word, nn.Module())
            module = getattr(module, word)
        module.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
    return model


def reasons(model: nn.Module, **options: Any) -> dict[str, str]:
    """Why AdamW takes a parameter, and "" if Muon does."""
    groups = muon_groups(model, **options)
    return {choice.names[0]: "" if choice.is_muon else choice.reason for choice in groups.choices}


MODELS: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "GPT-2": {
        "transformer.wte.weight": (TALL, "embedding"),
        "transformer.wpe.weight": (TALL, "embedding"),
        "transformer.h.0.attn.c_attn.weight": (TALL, ""),
        "transformer.h.0.attn.c_attn.bias": ((48,), "vector"),
        "transformer.h.0.mlp.c_proj.weight": (WIDE, ""),
        "lm_head.weight": (TALL, "output layer"),
    },
    "GPT-NeoX": {
        "gpt_neox.layers.0.attention.query_key_value.weight": (TALL, ""),
        "gpt_neox.layers.0.mlp.dense_4h_to_h.weight": (WIDE, ""),
        "embed_out.weight": (TALL, "output layer"),
    },
    "Llama": {
        "model.embed_tokens.weight": (TALL, "embedding"),
        "model.layers.0.self_attn.o_proj.weight": (SQUARE, ""),
        "model.layers.0.mlp.gate_proj.weight": (TALL, ""),
        "model.layers.0.mlp.up_proj.weight": (TALL, ""),
        "model.layers.0.mlp.down_proj.weight": (WIDE, ""),
        "score.weight": (WIDE, "output layer"),
    },
    "torchtitan": {
        "tok_embeddings.weight": (TALL, "embedding"),
        "layers.0.attention.wq.weight": (SQUARE, ""),
        "layers.0.feed_forward.w2.weight": (WIDE, ""),
        "layers.0.moe.router.gate.weight": (WIDE, "router"),
        "layers.0.moe.experts.w1": ((4, 48, 16), ""),
        "layers.0.moe.shared_experts.w1.weight": (TALL, ""),
        "output.weight": (TALL, "output layer"),
    },
    "BERT": {
        "bert.encoder.layer.0.attention.output.dense.weight": (SQUARE, ""),
        "bert.encoder.layer.0.output.dense.weight": (WIDE, ""),
        "bert.pooler.dense.weight": (SQUARE, ""),
        "cls.predictions.transform.dense.weight": (SQUARE, ""),
        "cls.predictions.decoder.weight": (TALL, "output layer"),
        "cls.seq_relationship.weight": (WIDE, "output layer"),
        "qa_outputs.weight": (WIDE, "output layer"),
    },
    "RoBERTa": {
        "lm_head.dense.weight": (SQUARE, ""),
        "lm_head.decoder.weight": (TALL, "output layer"),
        "classifier.dense.weight": (SQUARE, ""),
        "classifier.out_proj.weight": (WIDE, "output layer"),
    },
    "Whisper": {
        "model.encoder.conv1.weight": ((16, 8, 3), "3 dimensions"),
        "model.decoder.layers.0.self_attn.out_proj.weight": (SQUARE, ""),
        "model.decoder.layers.0.fc1.weight": (TALL, ""),
        "proj_out.weight": (TALL, "output layer"),
    },
    "FLUX": {
        "single_transformer_blocks.0.proj_out.weight": (SQUARE, ""),
        "proj_out.weight": (WIDE, "output layer"),
    },
    "OLMo": {
        "transformer.blocks.0.ff_out.weight": (WIDE, ""),
        "transformer.ff_out.weight": (TALL, "output layer"),
    },
    "Mixtral": {
        "model.layers.0.block_sparse_moe.gate.weight": (WIDE, "router"),
        "model.layers.0.block_sparse_moe.experts.0.w1.weight": (TALL, ""),
    },
    "DeepSeek": {
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (WIDE, ""),
        "model.layers.0.mlp.gate.weight": (WIDE, "router"),
        "model.layers.0.mlp.shared_experts.gate_proj.weight": (TALL, ""),
        "model.layers.1.shared_head.head.weight": (TALL, "output layer"),
    },
    "Qwen MoE": {
        "model.layers.0.mlp.shared_expert_gate.weight": ((1, 16), "one row or column"),
        "model.layers.0.mlp.experts.gate_up_proj": ((4, 96, 16), ""),
    },
    "Granite": {
        "model.layers.0.block_sparse_moe.router.layer.weight": (WIDE, "router"),
        "model.layers.0.block_sparse_moe.input_linear.weight": ((4, 48, 16), ""),
    },
    "gpt-oss": {
        "model.layers.0.mlp.router.weight": (WIDE, "router"),
        "model.layers.0.mlp.experts.down_proj_bias": (WIDE, "table"),
    },
    "experts with convolutions": {
        "experts.0.convolution.weight": ((4, 4, 3), "3 dimensions"),
        "experts.scale": ((4, 1, 16), "one row or column"),
    },
    "Switch": {"decoder.block.0.layer.1.mlp.router.classifier.weight": (WIDE, "router")},
    "DBRX": {"transformer.blocks.0.ffn.router.layer.weight": (WIDE, "router")},
    "DeepSpeed": {"layers.0.deepspeed_moe.gate.wg.weight": (WIDE, "router")},
    "a gated MLP": {"layers.0.mlp.gate.weight": (TALL, ""), "layers.0.attention.gate.weight": (SQUARE, "")},
    "torchvision": {
        "encoder.layers.0.self_attention.in_proj_weight": (TALL, ""),
        "heads.head.weight": (WIDE, "output layer"),
        "fc.weight": (WIDE, "output layer"),
        "layers.0.fc.weight": (SQUARE, ""),
        "classifier.1.weight": (SQUARE, ""),
        "classifier.4.weight": (WIDE, "output layer"),
    },
    "timm": {
        "pos_embed": ((8, 16), "table"),
        "blocks.0.attn.relative_position_bias_table": ((8, 16), "table"),
        "blocks.0.attn.qkv.weight": (TALL, ""),
        "head.fc.weight": (WIDE, "output layer"),
    },
    "CLIP": {
        "visual.positional_embedding": ((8, 16), "table"),
        "text_projection.weight": (SQUARE, "output layer"),
    },
    "MusicGen": {
        "decoder.lm_heads.0.weight": (TALL, "output layer"),
        "decoder.lm_heads.1.weight": (TALL, "output layer"),
        "decoder.layers.0.fc1.weight": (TALL, ""),
    },
    "heads of attention": {"blocks.0.heads.1.key.weight": (WIDE, ""), "lm_head.weight": (TALL, "output layer")},
    "Megatron": {
        "embedding.word_embeddings.weight": (TALL, "embedding"),
        "decoder.layers.0.mlp.router.weight": (WIDE, "router"),
        "decoder.layers.0.mlp.linear_fc1.weight": (TALL, ""),
        "output_layer.weight": (TALL, "output layer"),
    },
    "Mamba": {"layers.0.mixer.A_log": (SQUARE, "table"), "layers.0.mixer.in_proj.weight": (TALL, "")},
    "stages": {"0.layers.0.wq.weight": (SQUARE, ""), "1.output.weight": (TALL, "output layer")},
}


@pytest.mark.parametrize("kind", MODELS)
def test_names_of_models_of_today(kind: str) -> None:
    shapes = {name: shape for name, (shape, _) in MODELS[kind].items()}
    wanted = {name: reason for name, (_, reason) in MODELS[kind].items()}
    shapes["layers.9.hidden.weight"], wanted["layers.9.hidden.weight"] = SQUARE, ""  # Muon needs one
    assert reasons(model_of(shapes)) == wanted


def test_names_of_a_shared_matrix_count_together() -> None:
    model = model_of({"layers.0.wq.weight": SQUARE, "other.weight": TALL, "output.weight": TALL})
    model.get_submodule("output").weight = model.get_submodule("other").weight
    assert reasons(model) == {"layers.0.wq.weight": "", "other.weight": "output layer"}


def test_given_output_layers_take_the_place_of_the_names_of_output_layers_alone() -> None:
    model = model_of({"output.weight": TALL, "last.weight": TALL, "layers.0.router.weight": WIDE})
    found = reasons(model, head=["last.*"])
    assert found == {"output.weight": "", "last.weight": "head='last.*'", "layers.0.router.weight": "router"}


def test_matrices_go_to_muon_although_their_names_say_otherwise() -> None:
    model = model_of({"layers.0.router.weight": WIDE, "layers.1.router.weight": WIDE, "output.weight": TALL})
    found = reasons(model, matrices=["layers.0.router.*"])
    assert found == {
        "layers.0.router.weight": "",
        "layers.1.router.weight": "router",
        "output.weight": "output layer",
    }


def test_a_pattern_for_what_is_not_of_muon_is_refused_with_the_reason() -> None:
    model = model_of({"conv.w1": (2, 4, 4), "layers.0.wq.weight": SQUARE})
    words = r"no matrix of Muon has a name like '\*w1': conv.w1 of shape \(2, 4, 4\) is AdamW's \(3 dimensions"
    for options in ({"split": {"*w1": 2}}, {"matrices": ["*w1"]}):
        refuse(words, muon_groups, model, **options)


def test_stacks_of_experts_go_to_adamw_if_they_are_to() -> None:
    model = model_of({"experts.w1": (2, 4, 4), "experts.w2": (2, 4, 4), "wq.weight": SQUARE})
    found = reasons(model, experts=False, matrices=["*w2"])
    assert found == {"experts.w1": "experts=False", "experts.w2": "", "wq.weight": ""}


def test_the_matrices_of_a_stack_may_have_parts() -> None:
    *_, group = muon_groups(model_of({"experts.w13": (2, 8, 4)}), split={"*w13": 2})
    assert group["parts"] == 2
    refuse(
        r"\(8, 4\) cannot be split into parts=3", muon_groups, model_of({"experts.w": (2, 8, 4)}), split={"*": 3}
    )


TABLE = """\
optimizer  reason                 tensors  shape   name
Muon       matrices of 2, 6 rows  1        8 x 4   fused.weight
Muon       matrix                 2        4 x 4   layers.*.wq.weight
AdamW      embedding              1        10 x 4  embedding.weight = output.weight
AdamW      vector                 5                fused.bias, layers.*.norm.weight, layers.*.norm.bias
Muon: 3 tensors, 64 elements
AdamW: 6 tensors, 64 elements"""


def test_the_table_names_every_parameter_once() -> None:
    layers = [nn.ModuleDict({"wq": nn.Linear(4, 4, bias=False), "norm": nn.LayerNorm(4)}) for _ in range(2)]
    parts = {"embedding": nn.Embedding(10, 4), "fused": nn.Linear(4, 8), "layers": nn.ModuleList(layers)}
    model = nn.ModuleDict({**parts, "output": nn.Linear(4, 10, bias=False)})
    model["output"].weight = model["embedding"].weight
    groups = muon_groups(model, split={"fused.weight": [2, 6]})
    assert isinstance(groups, MuonGroups) and groups.description() == TABLE


@pytest.mark.parametrize(
    ("rank", "show", "printed"), [(None, True, True), (0, True, True), (1, True, False), (0, False, False)]
)
def test_the_table_is_printed_on_rank_0(
    rank: int | None, show: bool, printed: bool, monkeypatch: Any, capsys: Any
) -> None:
    started = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "2"}
    monkeypatch.setattr("os.environ", started)
    groups = muon_groups(model_of({"wq.weight": SQUARE}), show=show)
    assert capsys.readouterr().out == (f"{groups.description()}\n" if printed else "")
