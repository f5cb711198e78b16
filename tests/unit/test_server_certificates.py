"""Names of servers in certificates: one spelling for each, and a certificate counts for exactly one."""

from __future__ import annotations

import pytest

from cutwater.errors import InvalidArgument
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import Unproven
from cutwater.wire.identity.server_certificates import ServerName, check_claim, server_uris


@pytest.mark.parametrize(
    ("name", "uri"),
    [
        (ServerName(1, STORAGE_NODE, 2), "cutwater://1/sn/2"),
        (ServerName(70, METADATA_NODE, 1), "cutwater://70/mr/1"),
        (ServerName(2**63 - 1, STORAGE_NODE, 2**63 - 1), f"cutwater://{2**63 - 1}/sn/{2**63 - 1}"),
    ],
)
def test_a_name_is_a_uri(name: ServerName, uri: str) -> None:
    assert name.uri == uri
    assert ServerName.parse(uri) == name


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "cutwater://1/sn/02",
        "cutwater://1/sn/+2",
        "cutwater://1/sn/2/",
        "cutwater://1/sn/2\0",
        "cutwater://1/sn/2?x",
        "cutwater://1/SN/2",
        "Cutwater://1/sn/2",
        "cutwater://1/sn/0",
        "cutwater://0/sn/1",
        "cutwater://1/sn/-1",
        "cutwater://1/sn/\u0662",
        "cutwater://1/sn/\u00b2",
        "cutwater://1//2",
        "cutwater://1/client/2",
        f"cutwater://1/sn/{2**63}",
        "cutwater://1/sn/" + "9" * 5_000,
        "https://1/sn/2",
    ],
)
def test_other_spellings_are_no_names(uri: str) -> None:
    with pytest.raises(InvalidArgument):
        ServerName.parse(uri)


def shown(*uris: str) -> dict[str, object]:
    return {"subjectAltName": (("DNS", "cutwater://1/sn/1"), *(("URI", uri) for uri in uris))}


@pytest.mark.parametrize("is_required", [True, False])
def test_the_certificate_of_this_server_is_accepted(is_required: bool) -> None:
    check_claim(shown("cutwater://1/sn/1", "spiffe://x"), 1, STORAGE_NODE, "1", is_required=is_required)


@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize(
    "uris",
    [
        ["cutwater://1/sn/2"],
        ["cutwater://2/sn/1"],
        ["cutwater://1/mr/1"],
        ["cutwater://1/sn/1", "cutwater://1/sn/2"],
        ["cutwater://1/sn/1", "cutwater://1/sn/1"],
        ["cutwater://1/sn/1\0"],
        ["cutwater://1/sn/01"],
        ["cutwater://"],
    ],
)
def test_the_certificate_of_another_server_is_refused(uris: list[str], is_required: bool) -> None:
    with pytest.raises(Unproven, match=r"says that it is storage node 1 of cluster 1, and its certificate is for '"):
        check_claim(shown(*uris), 1, STORAGE_NODE, "1", is_required=is_required)


def test_a_certificate_that_names_no_server_depends_on_the_authorities() -> None:
    check_claim(shown(), 1, STORAGE_NODE, "1", is_required=False)
    check_claim({}, 1, STORAGE_NODE, "1", is_required=False)
    with pytest.raises(Unproven, match="it needs the URI cutwater://1/sn/1"):
        check_claim(shown("spiffe://x"), 1, STORAGE_NODE, "1", is_required=True)


def test_a_role_that_is_no_servers_is_refused() -> None:
    with pytest.raises(Unproven):
        check_claim(shown("cutwater://1/?/1"), 1, "client", "2", is_required=True)
    with pytest.raises(Unproven):
        check_claim(shown("cutwater://1/sn/1"), 1, "client", "1", is_required=False)


def test_only_uris_count() -> None:
    assert server_uris(shown("spiffe://x")) == ()
