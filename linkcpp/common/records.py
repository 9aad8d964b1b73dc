"""The base of every record that crosses a process border."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen value: validated when made, compared by content, never changed in place.

    Unknown fields are refused, so a file or message of a newer version fails by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class WireRecord(Record):
    """A record received from another machine; unknown fields of a newer peer are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="null")


class ErrorBody(WireRecord):
    """A refused call: a stable code, one sentence, and the way out."""

    code: str
    message: str
    hint: str | None = None
