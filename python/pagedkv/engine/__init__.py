"""Continuous batching over a transformers model: what runs, in which order, and what comes out of it."""

from .config import EngineConfig as EngineConfig
from .engine import Engine as Engine
from .results import EngineStats as EngineStats
from .results import NewToken as NewToken
from .results import Result as Result
from .results import StepOutput as StepOutput
