"""Chat templates by name, for models whose own template the server does not know or should not use.

Each is how the model's publisher writes a conversation. Values only; a backend without a name uses the model's own.
"""

from __future__ import annotations

from branchline.lang.backends.base import CHATML, PLAIN, Markup
from branchline.lang.errors import ArgumentError


def _alike(begin: str, end: str, stop: str, *, assistant: str = "assistant", system: bool = True) -> Markup:
    """All roles written the same way; `begin` holds {role}."""
    names = {"user": "user", "assistant": assistant} | ({"system": "system"} if system else {})
    opened = {role: begin.format(role=name) for role, name in names.items()}
    return Markup(opened, dict.fromkeys(names, end), stops=(stop,))


def _bracketed(end_assistant: str, system_begin: str, system_end: str, stops: tuple[str, ...]) -> Markup:
    """User messages in [INST] … [/INST]; the system message stands inside the first of them."""
    return Markup(
        begin={"system": f"[INST] {system_begin}", "user": "[INST] ", "assistant": ""},
        end={"system": system_end, "user": " [/INST]", "assistant": end_assistant},
        user_after_system="",
        stops=stops,
    )


_COMMAND_R = {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}
TEMPLATES: dict[str, Markup] = {
    "plain": PLAIN,
    "chatml": Markup(CHATML.begin, CHATML.end, stops=("<|im_end|>",)),
    "qwen": Markup(
        CHATML.begin,
        CHATML.end,
        default_system="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
        stops=("<|im_end|>",),
    ),
    "llama-2-chat": _bracketed(" </s><s>", "<<SYS>>\n", "\n<</SYS>>\n\n", ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")),
    "llama-3-instruct": _alike("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "<|eot_id|>"),
    "llama-4": _alike("<|header_start|>{role}<|header_end|>\n\n", "<|eot|>", "<|eot|>"),
    "mistral": _bracketed("</s>", "", "\n\n", ("</s>",)),
    "gemma-it": _alike("<start_of_turn>{role}\n", "<end_of_turn>\n", "<end_of_turn>", assistant="model", system=False),
    "phi-3": _alike("<|{role}|>\n", "<|end|>\n", "<|end|>"),
    "zephyr": _alike("<|{role}|>\n", "</s>\n", "</s>"),
    "granite-3": _alike("<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n", "<|end_of_text|>"),
    "deepseek-v3": Markup(
        begin={"system": "", "user": "<｜User｜>", "assistant": "<｜Assistant｜>"},
        end={"system": "", "user": "", "assistant": "<｜end▁of▁sentence｜>"},
        stops=("<｜end▁of▁sentence｜>",),
    ),
    "vicuna": Markup(
        begin={"system": "", "user": "USER: ", "assistant": "ASSISTANT: "},
        end={"system": " ", "user": " ", "assistant": "</s>"},
        default_system=(
            "A chat between a curious user and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the user's questions. "
        ),
        stops=("USER:", "</s>"),
    ),
    "command-r": Markup(
        begin={role: f"<|START_OF_TURN_TOKEN|><|{name}_TOKEN|>" for role, name in _COMMAND_R.items()},
        end=dict.fromkeys(_COMMAND_R, "<|END_OF_TURN_TOKEN|>"),
        stops=("<|END_OF_TURN_TOKEN|>",),
    ),
}


def get_chat_template(name: str) -> Markup:
    """How the template of that name writes roles.

    Raises:
        ArgumentError: there is none; lists those there are.
    """
    try:
        return TEMPLATES[name]
    except KeyError:
        known = ", ".join(sorted(TEMPLATES))
        raise ArgumentError(f"chat_template is {name!r}: give one of {known}, or a Markup of your own") from None
