"""Trains a tiny GPT with Megatron-Core on two replicas, EDGC attached by the code in the file named as argument.

``test_wheel.py`` starts it where there is only what the extra ``megatron`` declares, so it imports nothing of the
repository but the library.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from edgc.megatron import checkpoint, cpu_shims

with cpu_shims.without_compiler():
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, LENGTH, BATCH, STEPS = 64, 16, 2, 3


def main() -> None:
    dist.init_process_group("gloo")
    cpu_shims.install()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    torch.manual_seed(1)
    settings = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    gpt = GPTModel(
        config=settings,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
    )
    model_chunks = [DistributedDataParallel(settings, DistributedDataParallelConfig(), gpt)]
    model_chunks[0].broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0),
        model_chunks,
        use_gloo_process_groups=True,
    )

    names = {"model_chunks": model_chunks, "optimizer": optimizer}
    exec(Path(sys.argv[1]).read_text(encoding="utf-8"), names)
    attachment = names["attachment"]

    data = torch.Generator().manual_seed(1 + dist.get_rank())
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    entries = sum(parameter.numel() for parameter in gpt.parameters())
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=data)
        model_chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        losses = model_chunks[0](tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
        losses.float().mean().backward()
        finalize_model_grads(model_chunks)
        optimizer.step()
    assert attachment.last.iteration == STEPS, attachment.last
    sys.stdout.write(f"sent {attachment.last.statistics.bytes / (4 * entries):.3f} of the gradient\n")

    # As a training program saves: EDGC's state beside Megatron's own checkpoint of the model.
    folder = Path("checkpoint")
    if dist.get_rank() == 0:
        (folder / "model").mkdir(parents=True)
    dist.barrier()
    checkpoint.save(folder, attachment, iteration=STEPS)
    checkpoint.load(folder, attachment)
    dist_checkpointing.save({"model": gpt.sharded_state_dict()}, str(folder / "model"))
    attachment.remove()
    dist.destroy_process_group()


# Megatron starts processes to write a checkpoint, and they import this file.
if __name__ == "__main__":
    main()
