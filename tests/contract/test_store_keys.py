"""The bundled S3 server accepts two pairs of keys, one of which may only read, and no others."""

from __future__ import annotations

import http.client
import json
import os
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import ClientError

from tba.config.sections import StoreSection
from tba.errors import StoreUnavailableError
from tba.store import open_store
from tests.contract.conftest import BUCKET
from tests.support.s3_server import CREDENTIALS, PROGRAM, READ_ONLY, S3Server
from tests.support.secrets_seen import make_secrets

SERVE: dict[str, Any] = runpy.run_path(str(PROGRAM))


def client(server: S3Server, keys: dict[str, str]) -> Any:
    """boto3 with these keys."""
    session = Session(keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"], region_name="us-east-1")
    settings = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    return session.client("s3", endpoint_url=server.url, config=settings)


def code(error: pytest.ExceptionInfo[ClientError]) -> str:
    """Return S3's code of an error."""
    return error.value.response["Error"]["Code"]


def test_the_pair_that_may_only_read_reads_and_writes_nothing(s3_section: StoreSection, s3_server: S3Server) -> None:
    open_store(s3_section).put("a/b+=@.bin", b"x" * 100_000)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in READ_ONLY.items():
            patch.setenv(name, value)
        store = open_store(s3_section)
        assert (store.get("a/b+=@.bin"), list(store.list(""))) == (b"x" * 100_000, ["a/b+=@.bin"])
        store.check()
        for write in (lambda: store.put("b", b"new"), lambda: store.delete("a/b+=@.bin")):
            with pytest.raises(StoreUnavailableError, match="AccessDenied"):
                write()
    assert open_store(s3_section).get("a/b+=@.bin") == b"x" * 100_000
    reader = client(s3_server, READ_ONLY)
    for refused in (
        lambda: reader.create_multipart_upload(Bucket=BUCKET, Key="m"),
        lambda: reader.copy_object(Bucket=BUCKET, Key="c", CopySource=f"{BUCKET}/x"),
        lambda: reader.create_bucket(Bucket="another"),
        lambda: reader.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({})),
    ):
        with pytest.raises(ClientError) as error:
            refused()
        assert code(error) == "AccessDenied"
    each = reader.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "x"}]})  # S3 answers for each key
    assert [(one["Key"], one["Code"]) for one in each["Errors"]] == [("x", "AccessDenied")]


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({**CREDENTIALS, "AWS_ACCESS_KEY_ID": "bundled-for-trials"}, "InvalidAccessKeyId"),
        ({**CREDENTIALS, "AWS_SECRET_ACCESS_KEY": "bundled-for-trials"}, "SignatureDoesNotMatch"),
        ({**READ_ONLY, "AWS_SECRET_ACCESS_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"]}, "SignatureDoesNotMatch"),
    ],
)
def test_other_keys_are_refused(s3_server: S3Server, keys: dict[str, str], wanted: str) -> None:
    for call in ("list_objects_v2", "put_object"):
        with pytest.raises(ClientError) as error:
            getattr(client(s3_server, keys), call)(Bucket=BUCKET, **({"Key": "x"} if call == "put_object" else {}))
        assert code(error) == wanted


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 403),
        ("PUT", f"/{BUCKET}/stranger", 403),
        ("GET", f"/{BUCKET}", 403),
        ("DELETE", f"/{BUCKET}", 403),
        ("POST", "/?Action=CreateAccessKey&UserName=read_only", 405),  # IAM is off
        ("GET", "/healthz", 200),
    ],
)
def test_unsigned_requests_get_nothing_but_health(s3_server: S3Server, method: str, path: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", s3_server.port, timeout=30)
    connection.request(method, path)
    found = connection.getresponse().status
    connection.close()
    assert found == status


def test_a_server_without_keys_does_not_start(tmp_path: Path) -> None:
    for lacking in ("READ_WRITE_SECRET_ACCESS_KEY", "READ_ONLY_ACCESS_KEY_ID"):
        server = S3Server(tmp_path / lacking, without=lacking)
        with pytest.raises(AssertionError, match=f"there are no keys {lacking[:9].strip('_')}"):
            server.start()


def test_the_files_of_make_secrets_are_the_two_pairs(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    names = {"READ_WRITE_KEYS_FILE": "s3_credentials", "READ_ONLY_KEYS_FILE": "s3_credentials_readonly"}
    environ = {name: str(tmp_path / file) for name, file in names.items()}
    known = SERVE["identities"](environ)["identities"]
    may = {one["credentials"][0]["accessKey"]: set(one["actions"]) for one in known}
    assert may["tba"] >= {"Read", "List", "Write"}
    assert may["tba-read"] == {"Read", "List"}
    with pytest.raises(ValueError, match="is the id of both pairs"):
        SERVE["identities"]({**environ, "READ_ONLY_KEYS_FILE": environ["READ_WRITE_KEYS_FILE"]})
    with pytest.raises(ValueError, match="cannot be read"):
        SERVE["identities"]({**environ, "READ_ONLY_KEYS_FILE": "/nowhere"})


def test_only_s3_leaves_the_container_and_nothing_is_told_to_anybody(tmp_path: Path) -> None:
    """The other parts of SeaweedFS ask for no keys, and its telemetry is on unless it is switched off."""
    words = SERVE["command"]({"BIND_HOST": "0.0.0.0"}, folder=tmp_path, keys_file=Path("/keys"))
    flags = dict(word.removeprefix("-").split("=", 1) for word in words if "=" in word)
    assert {name for name, value in flags.items() if value == "0.0.0.0"} == {"s3.ip.bind"}
    assert flags["ip.bind"] == "127.0.0.1"
    assert flags["master.telemetry"] == flags["s3.iam"] == "false"
    with pytest.raises(ValueError, match="INTERNAL_PORTS is 1,2; give 7 ports"):
        SERVE["command"]({"INTERNAL_PORTS": "1,2"}, folder=tmp_path, keys_file=Path("/keys"))


@pytest.mark.parametrize(
    ("disk_gib", "room_gib", "volume_mb", "num"),
    [(1, 1, 64, 13), (20, 20, 640, 29), (300, 300, 1024, 292), (300, 16, 1024, 8), (20, 0.1, 640, 2)],
)
def test_a_disk_has_files_and_room_to_copy_one(disk_gib: int, room_gib: float, volume_mb: int, num: int) -> None:
    """Without that room the store would stay full: deleted objects go by copying the others."""
    assert SERVE["volume_mb"](disk_gib << 30) == volume_mb
    assert SERVE["num_volumes"](disk_gib << 30, int(room_gib * (1 << 30))) == num


def test_what_is_stored_takes_no_files_from_a_restarted_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tba_1.dat").write_bytes(b"x" * (1 << 20))
    held_bytes = (tmp_path / "tba_1.dat").stat().st_blocks * 512
    disk = SimpleNamespace(total=1 << 30, free=(1 << 30) - held_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    assert "-volume.max=13" in SERVE["command"]({}, folder=tmp_path, keys_file=Path("/keys"))


def test_a_new_store_alone_gets_a_first_file(tmp_path: Path) -> None:
    (tmp_path / "tba_3.dat").touch()
    SERVE["make_log_volume"](tmp_path)
    assert not (tmp_path / "1.dat").exists()
    (tmp_path / "tba_3.dat").unlink()
    SERVE["make_log_volume"](tmp_path)
    (tmp_path / "1.dat").write_bytes(b"log")
    SERVE["make_log_volume"](tmp_path)
    assert (tmp_path / "1.dat").read_bytes() == b"log"


def test_a_folder_has_one_store_at_a_time(tmp_path: Path) -> None:
    held = SERVE["lock"](tmp_path)
    assert os.get_inheritable(held), "the server keeps it"
    with pytest.raises(ValueError, match=rf"another store has had {tmp_path} for 0 s; end it, or give DATA_DIR"):
        SERVE["lock"](tmp_path, timeout_s=0)
    os.close(held)
    os.close(SERVE["lock"](tmp_path, timeout_s=0))


def test_the_limit_of_the_container_bounds_the_heap(tmp_path: Path) -> None:
    two, one = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    files = (two, one)
    assert SERVE["memory_limit_bytes"](files) is None
    two.write_text("max\n")
    one.write_text("9223372036854771712\n")
    assert SERVE["memory_limit_bytes"](files) is None
    one.write_text("1073741824\n")
    assert SERVE["memory_limit_bytes"](files) == 1 << 30
