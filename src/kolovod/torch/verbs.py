"""The verbs on tensors in this process's own world."""

from __future__ import annotations

from kolovod.core.world import current
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.frontend import TorchFrontend

collectives = TorchCollectives(TorchFrontend(), current)
