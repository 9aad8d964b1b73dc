"""Greedy tokens of a llama-server with their log-probabilities."""

from typing import Any

import httpx

from linkcpp.common.closing import AsyncClosing
from linkcpp.common.errors import LinkcppError
from linkcpp.launch.api import told_error
from linkcpp.verify.silence import silent
from linkcpp.verify.statistics import Comparison, Position, compare, same_beginning

BEST_TOKENS = 64
_REQUEST_SECONDS = 3600.0
# Where two runs part again and again there is nothing more to learn.
_MAX_PARTINGS = 4
# llama-server tells nothing of tokens that end within a character of several bytes.
_MORE_TOKENS = (0, 4, 16)


class TextServer(AsyncClosing):
    """One llama-server; ``who`` names it in errors, ``hint`` helps where it falls silent."""

    def __init__(
        self, url: str, who: str, api_key: str | None = None, hint: str | None = None
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._who = who
        self._hint = hint
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=_REQUEST_SECONDS, trust_env=False
        )

    async def aclose(self) -> None:
        """Give back what it holds; may be called twice."""
        await self._http.aclose()

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with those that the model wants before it.

        Raises:
            SilentError: it does not answer.
            LinkcppError: it answers, but not with tokens.
        """
        answer = await self._post("/tokenize", {"content": text, "add_special": True})
        try:
            return [int(token) for token in answer["tokens"]]
        except (LookupError, TypeError, ValueError) as error:
            raise self._nonsense() from error

    async def continue_text(self, tokens: list[int], count: int) -> list[Position]:
        """Return ``count`` greedy tokens after these, each with its ``BEST_TOKENS`` best.

        Raises:
            SilentError: it does not answer.
            LinkcppError: it answers, but not with that.
        """
        for more in _MORE_TOKENS:
            answer = await self._post(
                "/completion",
                {
                    "prompt": tokens,
                    "n_predict": count + more,
                    "temperature": 0,
                    "n_probs": BEST_TOKENS,
                    "cache_prompt": False,
                    "ignore_eos": True,
                },
            )
            try:
                found = [_position(step) for step in answer.get("completion_probabilities", ())]
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise self._nonsense() from error
            if found:
                return found[:count]
        raise self._nonsense()

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            answer = await self._http.post(path, json=body)
            if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                answer.raise_for_status()
            if answer.is_error:
                raise LinkcppError(f"{self._who} refuses: {told_error(answer.text)}")
            return answer.json()
        except httpx.HTTPError as error:
            raise silent(self._who, error, self._hint) from error
        except ValueError as error:
            raise self._nonsense() from error

    def _nonsense(self) -> LinkcppError:
        return LinkcppError(
            f"{self._who} answered without probabilities.",
            hint="Launch it with an engine of linkcpp (`linkcpp engine list`).",
        )


def _position(step: Any) -> Position:
    best = tuple((int(entry["id"]), float(entry["logprob"])) for entry in step["top_logprobs"])
    return Position(int(step["id"]), best)


async def compare_prompt(
    deployment: TextServer, reference: TextServer, prompt: list[int], count: int
) -> list[Comparison]:
    """Compare ``count`` positions after a prompt, one sequence at a time.

    Where the runs choose different tokens, both go on with the reference's.
    """
    comparisons: list[Comparison] = []
    text = list(prompt)
    for _ in range(_MAX_PARTINGS + 1):
        left = count - len(comparisons)
        theirs = await reference.continue_text(text, left)
        ours = await deployment.continue_text(text, left)
        shared = same_beginning(ours, theirs)
        comparisons += map(compare, ours[:shared], theirs[:shared])
        text += [position.token for position in theirs[:shared]]
        if len(comparisons) >= count:
            break
    return comparisons
