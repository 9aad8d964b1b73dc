"""Plans as text, and whether a plan is for this model."""

import json

from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.model.records import ModelInventory
from linkcpp.planning.records import SCHEMA_VERSION, Plan
from linkcpp.planning.sizes import missized
from linkcpp.planning.soundness import unsound

# A plan over a thousand nodes takes some hundred kilobytes.
MAX_PLAN_BYTES = 16 * 2**20
_MAKE_AGAIN = "Make the plan again with `linkcpp plan`."


def plan_text(plan: Plan) -> str:
    """Write a plan as the text of a plan file."""
    return plan.model_dump_json(indent=2) + "\n"


def parse_plan(text: bytes | str, *, source: str) -> Plan:
    """Read the text of a plan file; ``source`` names it in errors.

    Raises:
        LinkcppError: it is not a plan, or one of a newer linkcpp, or contradicts itself.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LinkcppError(f"{source} is not a plan: it is not JSON.", hint=_MAKE_AGAIN) from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or version < 1:
        raise LinkcppError(f"{source} is not a plan: it has no schema_version.", hint=_MAKE_AGAIN)
    if version > SCHEMA_VERSION:
        raise LinkcppError(
            f"{source} was written by a newer linkcpp (schema {version}, this one reads up to "
            f"{SCHEMA_VERSION}).",
            hint="Update linkcpp on this machine, or make the plan again here.",
        )
    try:
        plan = Plan.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise LinkcppError(
            f"{source} is not a valid plan: {where}: {first['msg']}.", hint=_MAKE_AGAIN
        ) from error
    if problem := unsound(plan):
        raise LinkcppError(f"{source} is not a valid plan: {problem}.", hint=_MAKE_AGAIN)
    return plan


def check_plan_model(plan: Plan, inventory: ModelInventory) -> None:
    """Refuse a plan that was made for another model, or has not the sizes of this one's layers.

    A plan that was made from a preset has no digest: then the model must have its shape.

    Raises:
        LinkcppError: the model is another one, or a size is wrong.
    """
    _check_identity(plan, inventory)
    if problem := missized(plan, inventory):
        raise LinkcppError(
            f"The plan contradicts the model {inventory.name}: {problem}.", hint=_MAKE_AGAIN
        )


def _check_identity(plan: Plan, inventory: ModelInventory) -> None:
    planned = plan.model
    if planned.digest is not None:
        if inventory.digest is not None and inventory.digest != planned.digest:
            raise LinkcppError(
                f"The plan was made for {planned.name} ({planned.source}), but {inventory.source} "
                f"is another model ({inventory.name}).",
                hint=f"Name the right file with --model, or plan again for {inventory.name}.",
            )
        return
    shape = inventory.shape
    found = (shape.architecture, len(inventory.layers), inventory.weight_bytes)
    wanted = (planned.architecture, planned.layer_count, planned.weight_bytes)
    if found != wanted:
        raise LinkcppError(
            f"The plan was made for the preset {planned.name} ({wanted[0]}, {wanted[1]} blocks, "
            f"{wanted[2]:,} bytes of weights), but {inventory.source} has {found[0]}, {found[1]} "
            f"blocks, {found[2]:,} bytes.",
            hint=f"Plan again for the file: `linkcpp plan --model {inventory.source}`.",
        )
