"""DeepSpeed with a stage of ZeRO, over the backend that is named.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_zero.py kolovod FOLDER STAGE

DeepSpeed compiles an extension when it starts.
"""

import sys

import deepspeed
import numpy
import torch

backend, folder, stage = sys.argv[1:]
deepspeed.init_distributed(dist_backend=backend)
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(50, 32),
    torch.nn.Flatten(),
    torch.nn.Linear(32 * 6, 128),
    torch.nn.GELU(),
    torch.nn.Linear(128, 50),
)
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.005, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": int(stage)},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
draw = torch.Generator().manual_seed(rank)


def train(steps: int) -> torch.Tensor:
    """Return the loss of each step; what is learned is the sum of the first and the last token."""
    losses = []
    for _ in range(steps):
        tokens = torch.randint(25, (8, 6), generator=draw)
        loss = torch.nn.functional.cross_entropy(engine(tokens), tokens[:, 0] + tokens[:, -1])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses)


train(60)
engine.save_checkpoint(f"{folder}/checkpoint", tag="middle")
train(20)
engine.load_checkpoint(f"{folder}/checkpoint", tag="middle")
loss = train(60)[-10:].mean()
torch.distributed.all_reduce(loss)
numpy.savez(
    f"{folder}/rank{rank}.npz",
    backend=torch.distributed.get_backend(),
    size=torch.distributed.get_world_size(),
    loss=loss.numpy() / torch.distributed.get_world_size(),
    **{f"weights.{name}": value.numpy() for name, value in engine.module.state_dict().items()},
)
torch.distributed.destroy_process_group()
