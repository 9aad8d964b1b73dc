"""Which proxy leads to an address."""

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.common.proxies import Proxy, proxy_for

PROXY = "http://proxy.example:3128"
ALL = {"https_proxy": PROXY, "http_proxy": PROXY, "all_proxy": PROXY}


@pytest.mark.parametrize(
    ("url", "variables", "expected"),
    [
        ("https://hub.example", {"HTTPS_PROXY": PROXY}, "HTTPS_PROXY"),
        ("wss://gw.example/v1/relay", {"https_proxy": PROXY}, "https_proxy"),
        ("https://hub.example", {"HTTP_PROXY": PROXY}, None),
        ("http://files.example/m.gguf", {"HTTP_PROXY": PROXY}, "HTTP_PROXY"),
        ("https://hub.example", {"ALL_PROXY": PROXY}, "ALL_PROXY"),
        ("https://hub.example", {"ALL_PROXY": "socks5://x:1", "https_proxy": PROXY}, "https_proxy"),
        ("https://hub.example", {"HTTPS_PROXY": " "}, None),
        ("https://hub.example", {}, None),
    ],
)
def test_the_variable_for_the_scheme_comes_before_that_for_all(
    url: str, variables: dict[str, str], expected: str | None
) -> None:
    chosen = proxy_for(url, variables)
    assert chosen == (Proxy(PROXY, expected) if expected else None)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "127.0.0.1", "127.1.2.3", "[::1]", "attic.local", "10.0.0.5", "172.31.0.1"),
        *("192.168.1.20:8716", "100.64.0.7", "[fe80::1%25eth0]", "[fd00::1]:8716", "169.254.1.1"),
    ],
)
def test_machines_that_are_near_are_dialled_directly(host: str) -> None:
    for scheme in ("http", "https", "ws", "wss"):
        assert proxy_for(f"{scheme}://{host}/v1", ALL) is None
        # What cannot be used does not matter there.
        assert proxy_for(f"{scheme}://{host}/v1", {"all_proxy": "socks://x:1"}) is None


@pytest.mark.parametrize(
    ("listed", "is_direct"),
    [
        ("*", True),
        ("hub.example", True),
        (".example", True),
        ("*.example", True),
        ("example", True),
        ("other.example, hub.example:8443", True),
        ("hub.example:9000", False),
        ("b.example", False),
        ("", False),
    ],
)
def test_what_no_proxy_lists_is_dialled_directly(listed: str, is_direct: bool) -> None:
    chosen = proxy_for("https://hub.example:8443", ALL | {"NO_PROXY": listed})
    assert (chosen is None) == is_direct


def test_no_proxy_takes_addresses_and_networks() -> None:
    for listed in ("203.0.113.9", "203.0.113.0/24", "2001:db8::/32"):
        variables = ALL | {"no_proxy": listed}
        direct = [
            url
            for url in ("https://203.0.113.9", "https://[2001:db8::1]:1", "https://198.51.100.1")
            if proxy_for(url, variables) is None
        ]
        assert direct == [
            "https://[2001:db8::1]:1" if ":" in listed else "https://203.0.113.9",
        ]


@pytest.mark.parametrize("value", ["socks://127.0.0.1:1080", "socks5://u:geheim@x:1"])
def test_a_socks_proxy_is_refused_with_the_variable_and_a_hint(value: str) -> None:
    with pytest.raises(LinkcppError, match=r"ALL_PROXY names a SOCKS proxy") as refused:
        proxy_for("https://hub.example", {"ALL_PROXY": value})
    assert "add hub.example to NO_PROXY" in str(refused.value)
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize("value", ["ftp://x", "http://", "http://x:y", "nonsense://"])
def test_what_is_not_the_address_of_a_proxy_is_refused_with_its_variable(value: str) -> None:
    with pytest.raises(LinkcppError, match="https_proxy is not the address of a proxy"):
        proxy_for("https://hub.example", {"https_proxy": value})


def test_a_proxy_without_a_scheme_speaks_http_and_its_password_is_not_told() -> None:
    assert proxy_for("https://a.example", {"https_proxy": "x:3128"}) == Proxy(
        "http://x:3128", "https_proxy"
    )
    told = str(Proxy("http://u:geheim@x:3128", "HTTPS_PROXY"))
    assert told == "through the proxy http://x:3128 of HTTPS_PROXY"
