"""What a request takes from earlier answers of its run: the conversation it continues, and items it only names.

The server finds the answers, within the run of the request's key; these functions say which and put them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import Choice
from gyre_sdk.harness.proxy.dialects.billing import without_billing
from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest, in_call_order
from gyre_sdk.harness.proxy.dialects.responses.answer import output_items
from gyre_sdk.harness.proxy.dialects.responses.items import item_type, messages_of
from gyre_sdk.harness.proxy.dialects.responses.request import instructed, split_raw

_RESPONSE = "resp_"
_ITEMS = ("rs_", "msg_", "fc_", "ctc_", "lsh_")


@dataclass(frozen=True, slots=True)
class Earlier:
    """A recorded answer and its request; `request.messages` is the whole conversation before the answer."""

    request: ModelRequest
    choice: Choice


def needs(request: ModelRequest) -> frozenset[str]:
    """Return the names of the answers that `complete` must be given. Empty for most requests.

    Raises:
        ProtocolError: the request refers to something that no answer can have given out.
    """
    names = {_answer_of(reference) for reference in _references(request)}
    if request.continues is not None:
        if not request.continues.startswith(_RESPONSE):
            raise _unknown("response", request.continues, "previous_response_id")
        names.add(request.continues.removeprefix(_RESPONSE))
    return frozenset(names)


def complete(request: ModelRequest, earlier: Mapping[str, Earlier]) -> ModelRequest:
    """Return the request with all of its conversation in `messages`, and `continues` None.

    The instructions of the request that it continues are left out: a request has its own or none.

    Args:
        request: as parsed.
        earlier: answers by name; those of `needs` that are not here do not exist.

    Raises:
        ProtocolError: an answer or an item does not exist, or the conversation is empty.
    """
    names = needs(request)
    instructions, items = split_raw(request.raw)
    if _references(request):
        given = {
            item["id"]: item
            for name, found in earlier.items()
            if name in names
            for item in output_items(found.request, name, found.choice)
        }
        items = [_resolved(item, given) for item in items]
    before: list[Message] = []
    if request.continues is not None:
        found_ = earlier.get(request.continues.removeprefix(_RESPONSE))
        if found_ is None:
            raise _unknown("response", request.continues, "previous_response_id")
        its_own = len(instructed(split_raw(found_.request.raw)[0]))
        before = [*found_.request.messages[its_own:], found_.choice.answer.message()]
    messages = in_call_order(instructed(instructions) + before + without_billing(messages_of(items)))
    if not messages:
        raise ProtocolError("input must hold something that the model can read", param="input", code="invalid_value")
    return replace(request, messages=messages, continues=None)


def _references(request: ModelRequest) -> list[str]:
    items = split_raw(request.raw)[1]
    return [str(item.get("id")) for item in items if item_type(item, "input") == "item_reference"]


def _answer_of(reference: str) -> str:
    kind = next((kind for kind in _ITEMS if reference.startswith(kind)), None)
    name, _, place = reference.removeprefix(kind or "").rpartition("_")
    if kind is None or not name or not place.isdecimal():
        raise _unknown("item", reference, "input")
    return name


def _resolved(item: Any, given: Mapping[str, dict[str, Any]]) -> Any:
    if item_type(item, "input") != "item_reference":
        return item
    found = given.get(str(item.get("id")))
    if found is None:
        raise _unknown("item", str(item.get("id")), "input")
    return found


def _unknown(what: str, name: str, param: str) -> ProtocolError:
    code = "previous_response_not_found" if what == "response" else "item_not_found"
    return ProtocolError(f"{what} {name!r} is not known to this run", status=400, code=code, param=param)
