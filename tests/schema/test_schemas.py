"""Schemas: values under names that are checked once, and do not change."""

from __future__ import annotations

import enum
import json
import math
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import pytest

from dpagent.errors import ParameterError
from dpagent.schema.base import Schema, checked_as, fields_of, read_json, rule, with_fields
from dpagent.schema.json_schema import json_schema
from dpagent.schema.json_values import json_of, json_values
from dpagent.schema.limits import After, Before, By, Limits
from dpagent.schema.problems import Fault, SchemaError, WithheldError


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


def _even(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


class Lid(Schema):
    """What closes a pot."""

    glass: bool = True
    colour: Colour = Colour.RED


class Pot(Schema):
    kind: Literal["pot"]
    litres: Annotated[float, Limits(gt=0, le=10)]
    lid: Lid | None = None


class Pan(Schema):
    kind: Literal["pan"]
    width: Annotated[int, Limits(ge=2), After(_even)]


class Kitchen(Schema):
    """A room.

    Its second paragraph.
    """

    room: ClassVar[str] = "the kitchen"
    name: Annotated[str, Limits(min_length=1, max_length=8, pattern=r"^[a-z]+$")]
    dishes: tuple[Annotated[Pot | Pan, By("kind")], ...] = ()
    shelf: Path = Path("shelf")
    sizes: Annotated[list[int], Limits(max_length=3)] | None = None
    prices: dict[str, float] | float = 1.0
    cooks: Annotated[int, Limits(ge=1)] = 1
    chairs: Annotated[int, Limits(ge=0)] = 1

    @rule
    def _everybody_sits(self) -> None:
        if self.chairs < self.cooks:
            raise ValueError(f"cooks is {self.cooks} and chairs is {self.chairs}; expected as many")

    @rule
    def _is_small(self) -> None:
        if self.cooks > 2:
            raise ValueError("it is too small")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def complaints(values: object, schema: Any = Kitchen) -> list[str]:
    with pytest.raises(SchemaError) as caught:
        checked_as(schema, values)
    return str(caught.value).splitlines()


def test_values_come_with_their_types_and_defaults() -> None:
    made = Kitchen.checked(
        {
            "name": "ours", "shelf": "a/b", "prices": {"tea": 2},
            "dishes": [{"kind": "pot", "litres": 3, "lid": {"colour": "blue"}}, Pan(kind="pan", width=4)],
        }
    )  # fmt: skip
    assert made == Kitchen(
        name="ours",
        dishes=(Pot(kind="pot", litres=3.0, lid=Lid(colour=Colour.BLUE)), Pan(kind="pan", width=4)),
        shelf=Path("a/b"), prices={"tea": 2.0},
    )  # fmt: skip
    assert isinstance(made.dishes[0], Pot)
    assert isinstance(made.dishes[0].litres, float)
    assert made.dishes[0].lid == Lid(colour=Colour.BLUE)
    assert made.given == {"name", "dishes", "shelf", "prices"}
    assert made.cooks == 1
    assert Kitchen.room == "the kitchen"
    assert "room" not in Kitchen.names


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": 5}, "name: got 5; expected text"),
        ({"name": ""}, "name: got ''; expected text of at least 1 character"),
        ({"name": "x" * 9}, "name: got 'xxxxxxxxx'; expected text of at most 8 characters"),
        ({"name": "A"}, "name: got 'A'; expected text of the pattern ^[a-z]+$"),
        ({"name": "a\n"}, "name: got 'a\\n'; expected text of the pattern ^[a-z]+$"),
        ({"name": "\ud800"}, "name: got '\\ud800'; expected text that UTF-8 can hold"),
        ({"cooks": True}, "cooks: got True; expected a whole number"),
        ({"cooks": 1.0}, "cooks: got 1.0; expected a whole number"),
        ({"cooks": "1"}, "cooks: got '1'; expected a whole number"),
        ({"cooks": 0}, "cooks: got 0; expected a number of at least 1"),
        ({"cooks": None}, "cooks: got None; expected a whole number"),
        ({"prices": math.inf}, "prices: got inf; expected a finite number"),
        ({"prices": {"tea": math.nan}}, "prices.tea: got nan; expected a finite number"),
        ({"prices": {1: 1}}, "prices.1: got 1; expected text"),
        ({"prices": []}, "prices: got []; expected keys and values or a number"),
        ({"prices": 10**400}, "expected a finite number"),
        ({"prices": True}, "prices: got True; expected keys and values or a number"),
        ({"shelf": 3}, "shelf: got 3; expected a path"),
        ({"sizes": (1,)}, "sizes: got (1,); expected a list"),
        ({"sizes": [1] * 4}, "sizes: got [1, 1, 1, 1]; expected a list of at most 3"),
        ({"sizes": [1, "2"]}, "sizes.1: got '2'; expected a whole number"),
        ({"dishes": {}}, "dishes: expected a list"),
        ({"dishes": [3]}, "dishes.0: got 3; expected keys and values"),
        ({"dishes": [{}]}, "dishes.0.kind: expected a value"),
        ({"dishes": [{"kind": "wok"}]}, "dishes.0.kind: got 'wok'; expected 'pot' or 'pan'"),
        ({"dishes": [{"kind": ["pot"]}]}, "dishes.0.kind: got ['pot']; expected 'pot' or 'pan'"),
        ({"dishes": [{"kind": "pot", "litres": 0}]}, "dishes.0.litres: got 0; expected a number above 0"),
        ({"dishes": [{"kind": "pan", "width": 3}]}, "dishes.0.width: 3 is odd"),
        ({"dishes": [{"kind": "pot", "litres": 1, "lid": {"colour": "green"}}]},
         "dishes.0.lid.colour: got 'green'; expected 'red' or 'blue'"),
        ({"stranger": 1}, "stranger: got 1; expected no key of that name"),
        ({"cooks": 2}, "cooks is 2 and chairs is 1; expected as many"),
        ({"cooks": 3, "chairs": 3}, "it is too small"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_words(changes: dict[str, Any], said: str) -> None:
    (line,) = complaints({"name": "ours"} | changes)
    assert said in line


def test_all_problems_are_named_and_then_the_first_rule_alone() -> None:
    assert complaints({"cooks": 0, "chairs": "x", "stranger": 1}) == [
        "name: expected a value",
        "cooks: got 0; expected a number of at least 1",
        "chairs: got 'x'; expected a whole number",
        "stranger: got 1; expected no key of that name",
    ]
    assert complaints({"name": "ours", "cooks": 3}) == ["cooks is 3 and chairs is 1; expected as many"]
    assert complaints([], Kitchen) == ["got []; expected keys and values"]


def test_problems_tell_what_they_are() -> None:
    with pytest.raises(SchemaError) as caught:
        Kitchen.checked({"cooks": 0, "chairs": "x", "stranger": 1})
    problems = caught.value.problems
    assert [each.fault for each in problems] == [Fault.MISSING, Fault.RANGE, Fault.OTHER, Fault.UNKNOWN]
    assert [each.is_out_of_range for each in problems] == [False, True, False, False]
    assert problems[1].complaint(shows_value=False) == "expected a number of at least 1"
    assert caught.value.first is problems[0]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_list_of_wrong_items_takes_a_bounded_number_of_sentences() -> None:
    assert 100 <= len(complaints([[None] * 5_000] * 5_000, list[list[int]])) < 300
    assert 100 <= len(complaints({str(key): None for key in range(60_000)}, dict[str, int])) < 300
    assert 100 <= len(complaints({"name": "a"} | {str(key): None for key in range(60_000)})) < 300


def test_secrets_and_long_values_are_not_repeated() -> None:
    def refused(text: str) -> str:
        raise WithheldError("it is a secret")

    assert complaints("swordfish", Annotated[str, After(refused)]) == ["it is a secret"]
    (line,) = complaints("x" * 10_000, int)
    assert len(line) < 200


def test_a_section_is_not_repeated() -> None:
    """It may hold a secret, and what is wrong with it is not in its values."""
    assert complaints({"name": {"password": "swordfish"}}) == ["name: expected text"]
    assert complaints({"name": "ours", "stranger": {"password": "swordfish"}}) == [
        "stranger: expected no key of that name"
    ]


@pytest.mark.parametrize(
    "value",
    [1 << 20_000, [1 << 20_000], nested(400), nested(50_000)],
    ids=["digits", "digits in a list", "nested", "nested deeply"],
)
def test_what_cannot_be_written_is_refused_in_words(value: Any) -> None:
    (line,) = complaints(value, str)
    assert line.endswith("expected text")
    assert len(line) < 200


def test_no_text_nests_so_deeply_that_it_is_not_refused() -> None:
    """Where the limit of recursion is met depends on who calls: reading may pass and the sentence may not."""
    for depth in range(sys.getrecursionlimit() + 10):
        with pytest.raises(SchemaError) as caught:
            Lid.from_json(b'{"glass": ' + b"[" * depth + b"1" + b"]" * depth + b"}")
        assert str(caught.value)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("\x1b[2J", r"\x1b[2J: "), ("\ud800", r"\ud800: "), ("a\nb", r"a\nb: "), ("é b", "é b: "),
        ("x" * 10_000, "x" * 80 + "…: "), (1 << 20_000, "a value of type int"), (None, "None: "),
    ],
    ids=["escape", "surrogate", "line", "printable", "long", "digits", "none"],
)  # fmt: skip
def test_keys_of_strangers_are_fit_for_a_terminal(key: Any, said: str) -> None:
    (line,) = complaints({key: 1}, Lid)
    assert line.startswith(said)
    assert line.isprintable()
    assert line.encode()


def test_the_length_of_a_list_is_looked_at_before_its_items() -> None:
    pair = Annotated[list[int], Limits(min_length=2, max_length=2)]
    assert complaints(["x"] * 3, pair) == ["got ['x', 'x', 'x']; expected a list of at most 2"]
    assert complaints(["x"], pair) == ["got ['x']; expected a list of at least 2"]
    assert complaints("xxx", pair) == ["got 'xxx'; expected a list"]
    assert complaints([1, 1], Annotated[dict[str, int], Limits(max_length=1)]) == [
        "got [1, 1]; expected keys and values"
    ]


@dataclass(frozen=True)
class Spoon:
    length: int
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.length > 9:
            raise ValueError("it is a ladle")


def test_a_dataclass_is_checked_like_a_section() -> None:
    assert checked_as(Spoon, {"length": 3}) == Spoon(3)
    assert checked_as(Spoon, {"length": 3, "colour": "blue"}) == Spoon(3, Colour.BLUE)
    assert complaints({}, Spoon) == ["length: expected a value"]
    assert complaints({"length": "3", "more": 1}, Spoon) == [
        "length: got '3'; expected a whole number", "more: got 1; expected no key of that name"
    ]  # fmt: skip
    assert complaints({"length": 10}, Spoon) == ["it is a ladle"]


def test_of_several_kinds_the_first_that_fits_is_taken_or_its_problem_said() -> None:
    assert checked_as(int | Lid, Lid()) == Lid()
    assert checked_as(int | Spoon, Spoon(3)) == Spoon(3)
    assert checked_as(Annotated[int | None, After(lambda value: value)] | str, None) is None
    assert complaints(1, Annotated[int, Limits(ge=5)] | Annotated[float, Limits(ge=9)]) == [
        "got 1; expected a number of at least 5"
    ]


def test_limits_and_functions_are_for_values_of_the_type() -> None:
    assert checked_as(Annotated[int | None, Limits(ge=1)], None) is None
    assert complaints("x", Annotated[int, After(_even)]) == ["got 'x'; expected a whole number"]
    assert complaints(0, Annotated[float, Limits(ge=1.0)]) == ["got 0; expected a number of at least 1"]
    assert complaints("x", Annotated[int, After(_even)] | float) == [
        "got 'x'; expected a whole number or a number"
    ]
    with pytest.raises(SchemaError) as caught:
        checked_as(Annotated[int, After(beyond)], 3)
    assert caught.value.first.is_out_of_range


def beyond(number: int) -> int:
    raise ParameterError(f"{number} is beyond what devices take")


def test_a_schema_inherits_rules_and_how_what_came_is_prepared() -> None:
    class Bistro(Kitchen):
        tables: dict[str, Lid] = MappingProxyType({})  # type: ignore[assignment]

        @classmethod
        def prepared(cls, values: Any) -> Any:
            return {"name": values} if isinstance(values, str) else values

    class Cafe(Bistro):
        terrace: bool = False

    assert complaints({"name": "ours", "cooks": 3, "chairs": 3}, Cafe) == ["it is too small"]
    made = Cafe.checked("ours").with_values({"tables": {"one": Lid(glass=False)}})
    assert made.as_dict(only_given=True) == {"name": "ours", "tables": {"one": {"glass": False}}}


def test_a_choice_is_of_its_own_type() -> None:
    one = Literal[1, "x"]
    assert checked_as(one, 1) == 1
    assert complaints(1.0, one) == ["got 1.0; expected 1 or 'x'"]
    assert complaints(True, one) == ["got True; expected 1 or 'x'"]
    assert checked_as(Literal["red"], Colour.RED) == "red"


def test_what_came_may_be_prepared() -> None:
    assert checked_as(Annotated[int, Before(lambda value: len(value))], "abc") == 3

    class Bowl(Schema):
        size: int
        kind: str = "bowl"

        @classmethod
        def prepared(cls, values: Any) -> Any:
            if values == "empty":
                raise ValueError("it is empty")
            return {"size": values} if isinstance(values, int) else values

    assert Bowl.checked(3) == Bowl(size=3)
    assert complaints("empty", Bowl) == ["got 'empty'; it is empty"]


def test_instances_do_not_change_and_are_equal_by_their_values() -> None:
    one, two = Lid(glass=True), Lid()
    assert one == two
    assert hash(one) == hash(two)
    assert (one.given, two.given) == ({"glass"}, set())
    assert one != Lid(glass=False)
    assert Lid() != Pot(kind="pot", litres=1)
    with pytest.raises(AttributeError, match="does not change"):
        one.glass = False  # type: ignore[misc]
    with pytest.raises(AttributeError, match="does not change"):
        del one.glass
    assert repr(one) == "Lid(glass=True, colour=<Colour.RED: 'red'>)"


def test_an_instance_with_other_values_remembers_what_was_given() -> None:
    made = Kitchen(name="ours").with_values({"cooks": 9})
    assert (made.name, made.cooks, made.given) == ("ours", 9, {"name", "cooks"})
    again = pickle.loads(pickle.dumps(made))
    assert (again, again.given) == (made, made.given)


def test_values_as_maps_leave_out_what_is_asked() -> None:
    made = Kitchen(name="ours", dishes=(Pot(kind="pot", litres=1, lid=Lid(glass=False)),))
    dish = {"kind": "pot", "litres": 1.0, "lid": {"glass": False}}
    assert made.as_dict(only_given=True) == {"name": "ours", "dishes": (dish,)}
    assert made.as_dict(include={"name", "cooks"}) == {"name": "ours", "cooks": 1}
    assert made.as_dict(exclude=set(Kitchen.names) - {"cooks"}) == {"cooks": 1}
    assert "sizes" not in made.as_dict(only_set=True)
    assert set(made.as_dict(only_changed=True)) == {"name", "dishes"}
    assert Kitchen.checked(made.as_dict()) == made


def test_bytes_have_a_length() -> None:
    key = Annotated[bytes, Limits(min_length=2, max_length=2)]
    assert checked_as(key, b"ab") == b"ab"
    assert complaints("ab", key) == ["got 'ab'; expected bytes"]
    assert complaints(b"a", key) == ["got b'a'; expected bytes of at least 2"]
    assert complaints(b"abc", key) == ["got b'abc'; expected bytes of at most 2"]


def test_json_and_back() -> None:
    made = Kitchen(name="ours", dishes=(Pot(kind="pot", litres=1, lid=Lid(colour=Colour.BLUE)),)).as_dict()
    text = json_of(made)
    assert b'"colour":"blue"' in text
    assert Kitchen.from_json(text) == Kitchen.checked(made)
    assert json_values({"a": math.inf, "b": (Path("x"), Colour.RED)}) == {"a": None, "b": ["x", "red"]}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b'{"name": NaN}', b"[" * 100_000, b'{"name": "\\ud800"}', b"\xff",
        '{"name": "ours"}'.encode("utf-16"), b'\xef\xbb\xbf{"name": "ours"}',
    ],
)  # fmt: skip
def test_json_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(SchemaError):
        Kitchen.from_json(text)
    with pytest.raises(SchemaError):
        read_json(Lid, b'{"glass": ' + b"1" * 5_000 + b"}")


def test_a_default_that_could_change_is_no_default() -> None:
    with pytest.raises(TypeError, match="can change"):

        class Wrong(Schema):
            sizes: list[int] = []  # noqa: RUF012


def test_a_key_has_no_name_of_the_schema_s_own() -> None:
    with pytest.raises(TypeError, match="cannot have this name"):

        class Wrong(Schema):
            names: tuple[str, ...] = ()  # type: ignore[misc]


def test_a_value_of_no_key_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="has no color"):
        Lid().with_values({"color": Colour.BLUE})


def test_a_schema_with_more_fields_is_itself_otherwise() -> None:
    more = with_fields(Lid, handle=(Annotated[int, Limits(ge=1)], 1))
    assert (more.__name__, more.__doc__, more.names) == ("Lid", Lid.__doc__, ("glass", "colour", "handle"))
    assert more(handle=2).as_dict()["handle"] == 2  # type: ignore[call-arg]
    assert complaints({"handle": 0}, more) == ["handle: got 0; expected a number of at least 1"]
    assert fields_of(more)["handle"].default == 1


def test_what_has_no_check_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="no type of values"):
        checked_as(complex, 1j)
    with pytest.raises(TypeError, match="no rule"):
        checked_as(Annotated[int, 5], 5)


def test_infinity_is_a_number_where_a_limit_says_so() -> None:
    for rules in ((Limits(ge=0, finite=False), After(abs)), (After(abs), Limits(ge=0, finite=False))):
        kind = Annotated[(float, *rules)]  # type: ignore[valid-type]
        assert checked_as(kind, math.inf) == math.inf
    assert checked_as(Annotated[float, After(abs), Limits(ge=0, finite=False)], -1) == 1
    kind = Annotated[float, Limits(ge=0, finite=False)]
    assert complaints(math.nan, kind) == ["got nan; expected a number of at least 0"]
    (line,) = complaints(10**400, kind)
    assert line.endswith("expected a finite number")


def test_the_json_schema_says_the_same() -> None:
    made = json_schema(Kitchen)
    assert (made["type"], made["additionalProperties"], made["description"]) == ("object", False, "A room.")
    assert made["required"] == ["name"]
    properties = made["properties"]
    assert properties["name"] == {"type": "string", "minLength": 1, "maxLength": 8, "pattern": "^[a-z]+$"}
    assert properties["cooks"] == {"type": "integer", "minimum": 1, "default": 1}
    assert properties["sizes"]["anyOf"][0] == {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
    pot, pan = properties["dishes"]["items"]["anyOf"]
    assert pot["properties"]["kind"] == {"enum": ["pot"]}
    assert pot["properties"]["litres"] == {"type": "number", "exclusiveMinimum": 0, "maximum": 10}
    assert pan["required"] == ["kind", "width"]
    assert json.loads(json.dumps(made)) == made
