"""Accesses files on any file system that Hadoop knows, through the JVM of a Spark session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from cutwater.core.jobs.checkpoint_stores import ATOMIC, check_checkpoint_store, refusal, scheme_of
from cutwater.errors import InvalidArgument
from cutwater.savepoints.files import Files, FileSummary, LocalFiles, is_local, rows_of

ATOMIC_CLASS: Final = "org.apache.hadoop.hdfs.DistributedFileSystem"
"""The Java class of file systems that rename atomically and are not local."""
VIEWS: Final = ("viewfs.View", "hdfs.View")
"""How names of classes begin that only show what is mounted in them, after the name of Hadoop's package."""
MOUNTS_MAX: Final = 8


def require_store(spark: SparkSession, checkpoint: str) -> None:
    """Refuse a checkpoint on a file system that is not known to rename atomically, by its name and by what the session
    has for this name."""
    check_checkpoint_store(checkpoint)
    place = checkpoint
    for _ in range(MOUNTS_MAX):
        if is_local(place):
            return
        files = HadoopFiles(spark)
        kind, mounted = files.store_of(place)
        if kind == ATOMIC_CLASS:
            return
        if mounted is None:
            raise InvalidArgument(refusal("the checkpoint", checkpoint, f"{scheme_of(place)}:// ({kind})"))
        if scheme_of(mounted) not in ATOMIC:
            raise InvalidArgument(refusal("the checkpoint", checkpoint, f"{mounted} by a mount"))
        place = mounted
    raise InvalidArgument(f"the checkpoint {checkpoint} goes through more than {MOUNTS_MAX} mounts, now at {place}")


def files_at(spark: SparkSession | None, path: str) -> Files:
    """Return local files for a path on this machine, and otherwise Hadoop's, which need a session."""
    if is_local(path):
        return LocalFiles()
    assert spark is not None, "only Spark reaches other file systems"
    return HadoopFiles(spark)


class HadoopFiles:
    """Reads and writes small files directly. Tasks of Spark read and write large ones."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        context: Any = spark.sparkContext
        self._gateway, self._jvm = context._gateway, context._jvm
        self._conf = context._jsc.hadoopConfiguration()

    def _at(self, path: str) -> tuple[Any, Any]:
        place = self._jvm.org.apache.hadoop.fs.Path(path)
        return place.getFileSystem(self._conf), place

    def store_of(self, path: str) -> tuple[str, str | None]:
        """Return the Java class of the file system of a path and, if that only shows other file systems, the place
        where the nearest existing directory above the path really is."""
        system, place = self._at(path)
        kind = str(system.getClass().getName())
        if not kind.removeprefix("org.apache.hadoop.").removeprefix("fs.").startswith(VIEWS):
            return kind, None
        while place.getParent() is not None and not system.exists(place):
            place = place.getParent()
        found = str(system.resolvePath(place).toString())
        return kind, None if found == self.qualified(str(place.toString())) else found

    def list(self, path: str) -> list[str]:
        system, place = self._at(path)
        if not system.exists(place) or not system.getFileStatus(place).isDirectory():
            return []
        return sorted(status.getPath().getName() for status in system.listStatus(place))

    def entries(self, path: str) -> Mapping[str, bool]:
        system, place = self._at(path)
        try:
            found = system.listStatus(place)
        except Py4JJavaError as error:
            if _is_missing(error):
                return {}
            raise
        return {status.getPath().getName(): bool(status.isDirectory()) for status in found}

    def exists(self, path: str) -> bool:
        system, place = self._at(path)
        return bool(system.exists(place))

    def read(self, path: str) -> bytes:
        system, place = self._at(path)
        if not system.exists(place):
            raise FileNotFoundError(path)
        stream = system.open(place)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def write(self, path: str, data: bytes) -> None:
        system, place = self._at(path)
        unfinished = self._jvm.org.apache.hadoop.fs.Path(place.getParent(), f".{place.getName()}.unfinished")
        stream = system.create(unfinished, True)
        try:
            stream.write(bytearray(data))
            stream.hsync()
        finally:
            stream.close()
        self._replace(system, unfinished, place)

    def _replace(self, system: Any, unfinished: Any, place: Any) -> None:
        """Replace a file with another one. The old file stays until then if the file system supports that."""
        hadoop = self._jvm.org.apache.hadoop.fs
        try:
            context = hadoop.FileContext.getFileContext(system.getUri(), self._conf)
        except Py4JJavaError as error:
            if error.java_exception.getClass().getSimpleName() != "UnsupportedFileSystemException":
                raise
        else:
            options = self._gateway.new_array(hadoop.Options.Rename, 1)
            options[0] = hadoop.Options.Rename.OVERWRITE
            context.rename(unfinished, place, options)
            return
        if system.exists(place):
            system.delete(place, False)
        if not system.rename(unfinished, place):
            raise OSError(f"{place} could not be put into its place: the file system refused to rename {unfinished}")

    def delete(self, path: str) -> None:
        system, place = self._at(path)
        system.delete(place, True)

    def copy(self, source: str, target: str) -> None:
        (system, place), (other, copied) = self._at(source), self._at(target)
        try:
            is_copied = self._jvm.org.apache.hadoop.fs.FileUtil.copy(
                system, place, other, copied, False, True, self._conf
            )
        except Py4JJavaError as error:
            if _is_missing(error):
                raise FileNotFoundError(source) from None
            raise
        if not is_copied:
            raise OSError(f"{source} could not be copied to {target}: the file system refused")

    def keep(self, path: str) -> None:
        """Do nothing: a file that a Hadoop file system has closed is as durable as that file system makes it."""

    def settle(self, paths: Iterable[str]) -> Mapping[str, FileSummary]:
        """Read the files. A file that a Hadoop file system has closed is as durable as that file system makes it."""
        return self.look(paths)

    def look(self, paths: Iterable[str]) -> Mapping[str, FileSummary]:
        wanted = {self.qualified(path): path for path in paths if self.exists(path)}
        if not wanted:
            return {}
        rows = self._spark.read.format("binaryFile").load(list(wanted)).select("path", "content")
        found = rows.mapInArrow(_looked, "path string, bytes bigint, sha256 string, rows bigint").collect()
        return {wanted[self.qualified(row[0])]: FileSummary(row[1], row[2], row[3]) for row in found}

    def qualified(self, path: str) -> str:
        system, place = self._at(path)
        return str(system.makeQualified(place).toString())


def _is_missing(error: Py4JJavaError) -> bool:
    return bool(error.java_exception.getClass().getSimpleName() == "FileNotFoundException")


_LOOKED: Final = pa.schema(
    [("path", pa.string()), ("bytes", pa.int64()), ("sha256", pa.string()), ("rows", pa.int64())]
)


def _looked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        paths = batch.column("path").to_pylist()
        contents = batch.column("content").to_pylist()
        yield pa.RecordBatch.from_pydict(
            {
                "path": paths,
                "bytes": [len(data) for data in contents],
                "sha256": [sha256(data).hexdigest() for data in contents],
                "rows": [rows_of(bytes(data)) for data in contents],
            },
            schema=_LOOKED,
        )
