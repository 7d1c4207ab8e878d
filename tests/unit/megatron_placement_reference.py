"""Ask Megatron itself for the parameters of every pipeline stage (helper program of test_placement.py).

Reads a JSON list of shapes on stdin, writes for each the list of stages, each a list of [name, local shape].
Each stage is built as its own first rank of a fake process group, on the meta device: the real model of the
real size, without its memory. A program of its own because it replaces process-wide functions.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402


def stage_parameters(shape: dict[str, int], stage: int) -> list[tuple[str, list[int]]]:
    tensor, pipeline, data = shape["tensor"], shape["pipeline"], shape["data"]
    world = tensor * pipeline * data
    dist.init_process_group("fake", rank=stage * tensor * data, world_size=world, store=FakeStore())
    parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        num_attention_heads=shape["heads"],
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    with torch.device("meta"):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=shape["padded_vocab"],
            max_sequence_length=shape["sequence_length"],
            pre_process=stage == 0,
            post_process=stage == pipeline - 1,
            share_embeddings_and_output_weights=bool(shape["tied"]),
            position_embedding_type="learned_absolute",
        )
    found = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    torch.cuda.current_device = lambda: torch.device("meta")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    shapes = json.load(sys.stdin)
    answer = [[stage_parameters(shape, stage) for stage in range(shape["pipeline"])] for shape in shapes]
    json.dump(answer, sys.stdout)
