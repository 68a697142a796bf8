"""Tool calls in the ways of other families, on real vLLM: forced by a grammar, and sampled freely and streamed live.

The policy has learned to call its tool, in four texts that are one token each. Here the proxy spells these tokens as
another family does, in prompts and in answers: the ids are those that the policy knows, the text is the family's.
"""

from __future__ import annotations

import copy
import json
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import agent as demo_agent
import pytest
from tasks import Split, generate
from tokenizers import Tokenizer

import gyre_sdk as gyre
from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallRecord

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TAGS = ("<tool_call>", '\n{"name": "bash", "arguments": {"command": "', '"}}\n', "</tool_call>")
"""What the policy writes around a command."""
START, END = '{{- \'<tool_call>\\n{"name": "\' }}', "{{- '}\\n</tool_call>' }}"
"""Where its chat template writes a call."""
NAME, JSON = "{{ tool_call.name }}", "{{ tool_call.arguments | tojson }}"
EACH = "{% for key, value in tool_call.arguments.items() %}"


@dataclass(frozen=True)
class Family:
    """How a family writes calls."""

    tags: tuple[str, str, str, str]
    """In the place of `TAGS`."""
    call: str
    """In its chat template."""
    grammar: str = ""
    """Holds an answer to a call, where the proxy forces none because the family has several ways to write one."""


COMMANDS = ["ls red", "wc -l green"]
OBJECT = '"{\\"command\\": \\"" ("ls red" | "wc -l green") "\\"}"'
FAMILIES = {
    "glm": Family(
        ("<tool_call>", "bash\n<arg_key>command</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        f"<tool_call>{NAME}\n{EACH}<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{{{{ value }}}}</arg_value>\n"
        "{% endfor %}</tool_call>",
    ),
    "minimax": Family(
        (
            "<minimax:tool_call>\n",
            '<invoke name="bash">\n<parameter name="command">',
            "</parameter>\n</invoke>\n",
            "</minimax:tool_call>",
        ),
        f'<minimax:tool_call>\n<invoke name="{NAME}">\n{EACH}<parameter name="{{{{ key }}}}">{{{{ value }}}}</parameter>\n'
        "{% endfor %}</invoke>\n</minimax:tool_call>",
    ),
    "dsml": Family(
        (
            "<｜DSML｜tool_calls>\n",
            '<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">',
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n",
            "</｜DSML｜tool_calls>",
        ),
        f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{NAME}">\n{EACH}<｜DSML｜parameter name="{{{{ key }}}}" string="true">'
        "{{ value }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    "kimi": Family(
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0",
            '<|tool_call_argument_begin|>{"command": "',
            '"}<|tool_call_end|>',
            "<|tool_calls_section_end|>",
        ),
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "llama": Family(
        ("<|python_tag|>", '{"name": "bash", "parameters": {"command": "', '"}}', "\n\n"),
        f'{{# <|start_header_id|> #}}<|python_tag|>{{"name": "{NAME}", "parameters": {JSON}}}',
    ),
    "deepseek": Family(
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function",
            '<｜tool▁sep｜>bash\n```json\n{"command": "',
            '"}\n```<｜tool▁call▁end｜>',
            "<｜tool▁calls▁end｜>",
        ),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{JSON}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        'root ::= "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\\n```json\\n" '
        f'{OBJECT} "\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"',
    ),
    "mistral": Family(
        ("[TOOL_CALLS]", '[{"name": "bash", "arguments": {"command": "', '"}}', "\n]"),
        f'[TOOL_CALLS][{{"name": "{NAME}", "arguments": {JSON}}}]',
        f'root ::= "[TOOL_CALLS]bash[ARGS]" {OBJECT}',
    ),
}
"""By the names of the proxy's formats."""
WORDS = ("set ", " to ", " in ", " > ", "= ")
"""Tokens of the vocabulary that are words of the template too: in a message they would not be one token."""
PACE = 0.02
"""Seconds between two tokens of an answer, as of a larger model."""
RESULT = "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def spelled(policy: Path, model: Path, family: Family) -> None:
    """Make the policy's model folder anew, with a family's words for its tags."""
    model.mkdir()
    words = dict(zip(TAGS, family.tags, strict=True))
    source = (policy / "chat_template.jinja").read_text()
    before, after = source[: source.index(START)], source[source.index(END) + len(END) :]
    for tag in (TAGS[0], TAGS[3]):
        before = before.replace(tag, words[tag].replace("\n", "\\n"))
    vocabulary = json.loads((policy / "tokenizer.json").read_text())
    words[" to "] = "<unused>"  # a token of the vocabulary, and a word of the template's own, where it must stay a word
    for token in vocabulary["added_tokens"]:
        token["content"] = words.pop(token["content"], token["content"])
    assert not words
    (model / "chat_template.jinja").write_text(f"{before}{{{{- '' }}}}{family.call}{after}")
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    for name in ("config.json", "generation_config.json"):
        (model / name).write_bytes((policy / name).read_bytes())


@dataclass(frozen=True)
class Served:
    """A proxy over vLLM that takes the policy for a model of another family."""

    family: Family
    service: gyre.ServiceClient
    store: Path
    tokenizer: Tokenizer

    @contextmanager
    def agent(self) -> Iterator[Any]:
        task = gyre.Task(instruction="x")
        with gyre.session(task, service=self.service, workspace="local") as agent:
            yield agent

    def calls(self, run: str) -> list[CallRecord]:
        with Journal(self.store, "r") as journal:
            return list(journal.calls(run))

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


class Paced(socketserver.BaseRequestHandler):
    """Hands on what a replica says, one event of a stream at a time: with a pause behind each."""

    there: tuple[str, int]

    def handle(self) -> None:
        with socket.create_connection(self.there) as above:
            for end in (above, self.request):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._ask, args=(above,), daemon=True).start()
            with suppress(OSError):  # the proxy has hung up
                while data := above.recv(1 << 16):
                    for part in re.split(rb"(?<=\n\n)", data):
                        self.request.sendall(part)
                        time.sleep(PACE if part.endswith(b"\n\n") else 0.0)

    def _ask(self, above: socket.socket) -> None:
        with suppress(OSError):
            while data := self.request.recv(1 << 16):
                above.sendall(data)
            above.shutdown(socket.SHUT_RDWR)


class Relay(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close = True, False


@pytest.fixture(scope="module")
def paced(vllm: str) -> Iterator[str]:
    """The server's address behind one that is as fast as a larger model."""
    place = urlsplit(vllm)
    with Relay(("127.0.0.1", 0), type("Handler", (Paced,), {"there": (place.hostname, place.port)})) as relay:
        serving = threading.Thread(target=relay.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{relay.server_address[1]}"
        relay.shutdown()
        serving.join()


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, paced: str, demo_policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder, family = tmp_path_factory.mktemp("family"), FAMILIES[request.param]
    spelled(demo_policy, folder / "model", family)
    settings = gyre.ProxySettings(
        store=folder / "s.db", model=folder / "model", renderer="template", replicas=(ReplicaSpec(paced, 0),)
    )
    with gyre.serve(settings) as service:
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        yield Served(family, service, settings.store, tokenizer)


def test_a_call_that_must_be_made(served: Served) -> None:
    """Under the grammar that the proxy makes of the family and the tool, or under one that the agent gives."""
    (tool,) = copy.deepcopy(demo_agent.TOOLS)
    tool["function"]["parameters"]["properties"]["command"] = {"enum": COMMANDS}
    forced: dict[str, Any] = {"tool_choice": "required"}
    if served.family.grammar:
        forced = {"extra_body": {"structured_outputs": {"grammar": served.family.grammar}}}
    with served.agent() as agent:
        answer = agent.openai().chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "go"}],
            tools=[tool],
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=800,
            logit_bias={str(served.tokenizer.token_to_id("<think>")): -100},
            **forced,
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    (call,) = choice.message.tool_calls
    said = json.loads(call.function.arguments)
    assert call.function.name == "bash" and said.keys() == {"command"} and said["command"] in COMMANDS


def test_calls_arrive_while_they_are_sampled(served: Served) -> None:
    """As the policy makes them of its own accord; their results go on from what was sampled."""
    task = next(
        task.instruction for task in generate(Split.TRAIN, 20, 5) if not any(word in task.instruction for word in WORDS)
    )
    ask: list[Any] = [{"role": "system", "content": demo_agent.SYSTEM}, {"role": "user", "content": task}]
    body: dict[str, Any] = {"model": "policy", "tools": demo_agent.TOOLS, "temperature": 0, "max_tokens": 32}
    deadline = time.monotonic() + 300
    with served.agent() as agent:
        chat = agent.openai().chat.completions
        call, pieces = streamed(chat, messages=ask, **body)
        answered = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"},
        ]
        chat.create(messages=[*ask, *answered], **{**body, "max_tokens": 4})
        while pieces == 1:  # the server or the proxy came to it late: once more
            assert time.monotonic() < deadline, "a call that is read at the end of its answer comes in one piece"
            call, pieces = streamed(chat, messages=ask, **body)
    first, second, *others = served.calls(agent.result.run)
    opening, head, tail, closing = served.family.tags
    command = json.loads(call["function"]["arguments"])["command"]
    assert call["function"]["name"] == "bash"
    for made in (first, *others):
        assert served.text(made.sampled_ids) == f"{opening}{head}{command}{tail}{closing}<|im_end|>"
    assert (second.parent, second.fork_reason) == (first.call, None)
    path = [*first.prompt_ids, *first.sampled_ids]
    assert second.prompt_ids[: len(path)] == path
    assert served.text(second.prompt_ids[len(path) :]) == RESULT


def streamed(chat: Any, **body: Any) -> tuple[dict[str, Any], int]:
    """Return the one call of a streamed answer, and in how many pieces its arguments came."""
    call: dict[str, Any] | None = None
    pieces = 0
    for chunk in chat.create(stream=True, **body):
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.id:
                assert call is None
                call = {"id": part.id, "type": "function", "function": {"name": part.function.name, "arguments": ""}}
            assert call is not None
            if part.function.arguments:
                call["function"]["arguments"] += part.function.arguments
                pieces += 1
    assert call is not None
    return call, pieces
