import os

import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def work(rank):
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    net = DistributedDataParallel(torch.nn.Linear(4, 1))
    net(torch.ones(2, 4) * rank).sum().backward()
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29411"}
    multiprocessing.spawn(work, nprocs=RANKS)
