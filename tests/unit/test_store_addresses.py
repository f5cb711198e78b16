"""The addresses of metadata stores: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cutwater.errors import InvalidArgument
from cutwater.metadata.etcd.address import EtcdAddress, EtcdTls, parse_address
from cutwater.metadata.stores.memory_store import MemoryStore
from cutwater.metadata.stores.open_store import open_store
from cutwater.types import ClusterId


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("etcd://a:2379", EtcdAddress(("a:2379",), "cutwater")),
        ("etcd://a:2379/", EtcdAddress(("a:2379",), "cutwater")),
        ("etcd://a:1,b:2,10.0.0.3:3/prod/log", EtcdAddress(("a:1", "b:2", "10.0.0.3:3"), "prod/log")),
        ("etcd://[::1]:2379,[fe80::1]:2380/x", EtcdAddress(("[::1]:2379", "[fe80::1]:2380"), "x")),
        ("etcd://a:1/x?tls.ca=/etc/ca.pem", EtcdAddress(("a:1",), "x", EtcdTls(Path("/etc/ca.pem")))),
        (
            "etcd://a:1/x?tls.ca=ca.pem&tls.cert=c.pem&tls.key=k.pem",
            EtcdAddress(("a:1",), "x", EtcdTls(Path("ca.pem"), Path("c.pem"), Path("k.pem"))),
        ),
    ],
)
def test_addresses_of_etcd(url: str, address: EtcdAddress) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("etcd:a:1/x", "'' is not HOST:PORT"),
        ("etcd://", "'' is not HOST:PORT"),
        ("etcd://a/x", "'a' is not HOST:PORT"),
        ("etcd://a:1,/x", "'' is not HOST:PORT"),
        ("etcd://a:99999/x", "'a:99999' is not HOST:PORT"),
        ("etcd://user:secret@a:1/x", "'etcd://(login)@a:1/x' is no address of etcd, because it has a login"),
        ("etcd://a:1,user:secret@b:1/x", "'etcd://(login)@b:1/x' is no address of etcd, because it has a login"),
        ("etcd://user:sec,ret@a:1,u:p@b:1/x", "'etcd://(login)@b:1/x' is no address of etcd, because it has a login"),
        ("etcd://a:1,a:1/x", "an endpoint is named twice"),
        ("etcd://a:1/x y", "'x y' is no prefix of keys"),
        ("etcd://a:1/x#y", "it is of another form"),
        ("etcd://a:1/x?lease=3", "'lease' is unknown"),
        ("etcd://a:1/x?tls.cert=c.pem", "TLS needs tls.ca"),
        ("etcd://a:1/x?tls.ca=ca.pem&tls.key=k.pem", "tls.cert and tls.key both or neither"),
        ("etcd://a:1/x?tls.ca", "bad query field"),
    ],
)
def test_what_is_no_address_of_etcd_is_explained(url: str, why: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_address(url)
    assert why in caught.value.message
    assert "write etcd://HOST:PORT" in caught.value.message


@pytest.mark.parametrize("url", ["", "sqlite", "sqlite:", "memory", "memory:x", "etcd", "postgres://a/b", "./data"])
def test_what_names_no_store_is_explained(url: str) -> None:
    with pytest.raises(InvalidArgument, match="names no metadata store: write sqlite:PATH, etcd://HOST:PORT"):
        asyncio.run(open_store(url, cluster=ClusterId(1)))


def test_stores_in_memory_share_nothing() -> None:
    async def run() -> None:
        one, two = [await open_store("memory:", cluster=ClusterId(1)) for _ in range(2)]
        assert isinstance(one, MemoryStore)
        assert isinstance(two, MemoryStore)
        assert one.data is not two.data

    asyncio.run(run())
