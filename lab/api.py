"""What plugin authors import, and all that they need to."""

from dataclasses import dataclass, field

from lab import native
from lab.capabilities import API_VERSION, Capabilities, common
from lab.contracts.attention import Attention, AttentionSpec, OperatorCall
from lab.contracts.draft_length import DraftLength, Verified
from lab.contracts.moe import Moe
from lab.contracts.policy import Policy
from lab.contracts.quant import LinearSpec, ParamSpec, Quant
from lab.contracts.sink import RunInfo, Sink
from lab.contracts.spec import Draft, DraftCache, Proposer, ProposeView, StepView, Target
from lab.contracts.workload import ModelFacts, WorkItem, Workload
from lab.errors import UserError, nearest
from lab.registry import entries as plugins
from lab.registry import get as find_plugin
from lab.registry import register
from lab.types import Request

__all__ = [
    "API_VERSION",
    "Attention",
    "AttentionSpec",
    "Capabilities",
    "Draft",
    "DraftCache",
    "DraftLength",
    "LinearSpec",
    "ModelFacts",
    "Moe",
    "OperatorCall",
    "ParamSpec",
    "Policy",
    "ProposeView",
    "Proposer",
    "Quant",
    "Request",
    "RunInfo",
    "Sink",
    "StepView",
    "Target",
    "UserError",
    "Verified",
    "WorkItem",
    "Workload",
    "common",
    "dataclass",
    "field",
    "find_plugin",
    "native",
    "nearest",
    "plugins",
    "register",
]
