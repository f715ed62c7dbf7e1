"""Chat templates, rendered as transformers renders them, in a sandbox."""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 64 << 20


class ChatTemplateError(Exception):
    """The template refused the conversation, or failed on it; one line for the client."""


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like transformers' filter: no HTML escapes, and not ASCII only."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. `special_tokens`: bos_token, eos_token ... as the template sees them.

    Raises ChatTemplateError when the source is not a template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self.uses_tools = "tools" in source
        try:
            self._template: Template = _environment().from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """The prompt's text. `arguments` are further variables of the template. Raises ChatTemplateError."""
        variables = {
            **self._special_tokens,
            **arguments,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = "".join(self._pieces(variables))
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error.message or error}") from error
        except RecursionError as error:
            raise ChatTemplateError("the messages are nested too deeply for the chat template") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError) as error:
            raise ChatTemplateError(f"the chat template failed on the messages: {error}") from error
        return text

    def _pieces(self, variables: dict[str, Any]) -> list[str]:
        pieces, length = [], 0
        for piece in self._template.generate(variables):
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise TemplateError("the rendered prompt is too long")
            pieces.append(piece)
        return pieces
