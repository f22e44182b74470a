"""The frontend language: programs that generate, select, fork and join.

    from branchline import lang as bl

    @bl.function
    def tips(s, topic):
        s += "Tips for " + topic + ":"
        forks = s.fork(3)
        for index, branch in enumerate(forks):
            branch += f"\\n{index + 1}." + bl.gen("tip", max_tokens=24, stop="\\n")
        forks.join()
        s += "\\n".join(s["tip"])

    state = tips.run(topic="sleep", backend=bl.Runtime("http://127.0.0.1:8080"))

Torch-free, and independent of the engine. Vendors' packages are imported when their backend is made.
"""

from branchline.lang.backends.anthropic import Anthropic
from branchline.lang.backends.base import Backend, Markup
from branchline.lang.backends.engine import Engine
from branchline.lang.backends.gemini import Gemini, VertexAI
from branchline.lang.backends.litellm import LiteLLM
from branchline.lang.backends.mock import Mock
from branchline.lang.backends.openai import OpenAI
from branchline.lang.backends.runtime import Runtime
from branchline.lang.blocks import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    named,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from branchline.lang.errors import (
    ArgumentError,
    BackendError,
    CancelledError,
    DeadlineError,
    JoinError,
    LangError,
    ParseError,
    ProgramError,
    UnknownVariable,
    UnsupportedError,
)
from branchline.lang.ir import Hints
from branchline.lang.log import Log, diff
from branchline.lang.program import Program, flush_cache, function, get_server_info, set_default_backend
from branchline.lang.state import Forks, State
from branchline.lang.templates import get_chat_template
from branchline.lang.trace import Trace
from branchline.lang.values import MISSING, Event

RuntimeEndpoint = Runtime  # its name in SGLang

__all__ = [
    "MISSING",
    "Anthropic",
    "ArgumentError",
    "Backend",
    "BackendError",
    "CancelledError",
    "DeadlineError",
    "Engine",
    "Event",
    "Forks",
    "Gemini",
    "Hints",
    "JoinError",
    "LangError",
    "LiteLLM",
    "Log",
    "Markup",
    "Mock",
    "OpenAI",
    "ParseError",
    "Program",
    "ProgramError",
    "Runtime",
    "RuntimeEndpoint",
    "State",
    "Trace",
    "UnknownVariable",
    "UnsupportedError",
    "VertexAI",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "diff",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_chat_template",
    "get_server_info",
    "image",
    "named",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
    "video",
]
