"""The verbs on tensors in this process's own world."""

from __future__ import annotations

from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.frontend import TorchFrontend
from kolovod.world import current

collectives = TorchCollectives(TorchFrontend(), current)
