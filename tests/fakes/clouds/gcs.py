"""Cloud Storage over one dictionary: the JSON API that google-cloud-storage speaks, the XML API that obstore speaks.

Objects live in the world's memory. Generations are counted, so that `if-generation-match: 0` (create, do not replace)
works. Every caller is accepted.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from urllib.parse import unquote
from xml.sax.saxutils import escape

from tests.fakes.clouds.faults import Faults, Kind
from tests.fakes.clouds.gce import is_users


@dataclass(frozen=True, kw_only=True, slots=True)
class Object:
    data: bytes
    generation: int
    updated: datetime
    kind: str = "application/octet-stream"

    @property
    def md5(self) -> bytes:
        return hashlib.md5(self.data, usedforsecurity=False).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    status: int = 200
    data: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Gcs:
    faults: Faults
    buckets: dict[str, dict[str, Object]] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    sessions: dict[str, tuple[str, str, bytearray]] = field(default_factory=dict)
    counter: int = 1
    lock: threading.RLock = field(default_factory=threading.RLock)

    def answer(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], raw: bytes
    ) -> Answer:
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if is_users(token) and self.faults.met(Kind.EXPIRED, "gcp"):
            return _error(401, "authError", "Invalid Credentials")
        if self.faults.met(Kind.STORE_DOWN, "gcp"):
            return _error(503, "backendError", "We encountered an internal error. Please try again.")
        with self.lock:
            if found := re.fullmatch(r"(?:/(upload|download))?/storage/v1/b(?:/([^/]+))?(?:/o(?:/(.+?))?)?", path):
                kind, bucket, name = found[1], found[2] or "", unquote(found[3] or "")
                if kind == "upload":
                    return self._json_upload(method, bucket, query, headers, raw)
                return self._json(method, path, bucket, name, query, raw, whole=kind == "download")
            bucket, _, name = unquote(path).lstrip("/").partition("/")
            return self._xml(method, bucket, name, query, headers, raw)

    def _store(
        self, bucket: str, name: str, data: bytes, generation_match: str | None, kind: str = ""
    ) -> Object | None:
        """Store an object. Return None if its generation is not the requested one."""
        objects = self.buckets[bucket]
        there = objects[name].generation if name in objects else 0
        if generation_match is not None and int(generation_match) != there:
            return None
        self.counter += 1
        kind = kind or "application/octet-stream"
        made = Object(data=bytes(data), generation=self.counter, updated=datetime.now(UTC), kind=kind)
        objects[name] = made
        return made

    # --- XML: obstore

    def _xml(
        self, method: str, bucket: str, name: str, query: Mapping[str, str], headers: Mapping[str, str], raw: bytes
    ) -> Answer:
        if bucket not in self.buckets:
            return _error(404, "NoSuchBucket", f"The specified bucket {bucket} does not exist.")
        objects = self.buckets[bucket]
        if not name:
            return self._list(bucket, query)
        match method:
            case "POST" if "uploads" in query:
                self.counter += 1
                upload = f"upload-{self.counter}"
                self.uploads[upload] = {}
                inner = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
                return _xml("InitiateMultipartUploadResult", inner)
            case "PUT" if "uploadId" in query:
                self.uploads[query["uploadId"]][int(query["partNumber"])] = raw
                return Answer(headers={"ETag": f'"{hashlib.md5(raw, usedforsecurity=False).hexdigest()}"'})
            case "POST" if "uploadId" in query:
                parts = self.uploads.pop(query["uploadId"])
                data = b"".join(parts[number] for number in sorted(parts))
                made = self._store(bucket, name, data, headers.get("x-goog-if-generation-match"))
                if made is None:
                    return _error(412, "PreconditionFailed", "At least one precondition did not hold.")
                return _xml("CompleteMultipartUploadResult", f"<ETag>{_etag(made)}</ETag>", _object_headers(made))
            case "DELETE" if "uploadId" in query:
                self.uploads.pop(query["uploadId"], None)
                return Answer(status=204)
            case "PUT":
                if source := headers.get("x-goog-copy-source"):
                    from_bucket, _, from_name = unquote(source).lstrip("/").partition("/")
                    if from_name not in self.buckets.get(from_bucket, {}):
                        return _error(404, "NoSuchKey", "The specified key does not exist.")
                    raw = self.buckets[from_bucket][from_name].data
                made = self._store(bucket, name, raw, headers.get("x-goog-if-generation-match"))
                if made is None:
                    return _error(412, "PreconditionFailed", "At least one precondition did not hold.")
                answer = _xml("CopyObjectResult", f"<ETag>{_etag(made)}</ETag>") if source else Answer()
                return Answer(data=answer.data, headers=_object_headers(made))
            case "DELETE":
                return Answer(status=204) if objects.pop(name, None) else _error(404, "NoSuchKey", "no such key")
        if name not in objects:
            return _error(404, "NoSuchKey", "The specified key does not exist.")
        return _part(objects[name], headers)

    def _list(self, bucket: str, query: Mapping[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or ""
        names, folders = self._names(bucket, prefix, delimiter)
        names = [name for name in names if name > after]
        most = int(query.get("max-keys", 1000))
        page, more = names[:most], len(names) > most
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Generation>{one.generation}</Generation>"
            f"<LastModified>{_iso(one.updated)}</LastModified><ETag>{_etag(one)}</ETag><Size>{len(one.data)}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for name, one in ((name, self.buckets[bucket][name]) for name in page)
        )
        rows += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        head = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
        return _xml("ListBucketResult", f"{head}<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}")

    def _names(self, bucket: str, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        names, folders = [], set()
        for name in sorted(self.buckets[bucket]):
            if name.startswith(prefix):
                inner, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                if found:
                    folders.add(prefix + inner + delimiter)
                else:
                    names.append(name)
        return names, sorted(folders)

    # --- JSON: google-cloud-storage

    def _json(
        self, method: str, path: str, bucket: str, name: str, query: Mapping[str, str], raw: bytes, whole: bool
    ) -> Answer:
        if not bucket:
            if method == "POST":
                made = json.loads(raw)["name"]
                if made in self.buckets:
                    return _error(409, "conflict", "Your previous request to create the named bucket succeeded")
                self.buckets[made] = {}
                return _json(_bucket(made))
            return _json({"kind": "storage#buckets", "items": [_bucket(one) for one in self.buckets]})
        if bucket not in self.buckets:
            return _error(404, "notFound", f"The specified bucket {bucket} does not exist.")
        objects = self.buckets[bucket]
        if not name and not path.endswith("/o"):
            if method == "DELETE":
                del self.buckets[bucket]
                return Answer(status=204)
            return _json(_bucket(bucket))
        if not name:
            names, folders = self._names(bucket, query.get("prefix", ""), query.get("delimiter", ""))
            items = [_object_json(bucket, one, objects[one]) for one in names]
            return _json({"kind": "storage#objects", "items": items, "prefixes": folders})
        if name not in objects:
            return _error(404, "notFound", f"No such object: {bucket}/{name}")
        if method == "DELETE":
            del objects[name]
            return Answer(status=204)
        if whole or query.get("alt") == "media":
            return _part(objects[name], {})
        return _json(_object_json(bucket, name, objects[name]))

    def _json_upload(
        self, method: str, bucket: str, query: Mapping[str, str], headers: Mapping[str, str], raw: bytes
    ) -> Answer:
        if bucket not in self.buckets:
            return _error(404, "notFound", f"The specified bucket {bucket} does not exist.")
        match = query.get("ifGenerationMatch")
        if method == "PUT":  # the next piece of a resumable upload
            _, name, kept = self.sessions[query["upload_id"]]
            kept += raw
            span = re.fullmatch(r"bytes (?:\*|\d+-\d+)/(\d+|\*)", headers.get("content-range", ""))
            if span and (span[1] == "*" or len(kept) < int(span[1])):
                return Answer(status=308, headers={"Range": f"bytes=0-{len(kept) - 1}"})
            data = bytes(kept)
        elif query.get("uploadType") == "resumable":
            self.counter += 1
            session = f"session-{self.counter}"
            name = query.get("name") or json.loads(raw)["name"]
            self.sessions[session] = (bucket, name, bytearray())
            place = f"https://storage.googleapis.com/upload/storage/v1/b/{bucket}/o?upload_id={session}"
            return Answer(headers={"Location": place})
        elif query.get("uploadType") == "multipart":
            boundary = re.search(r"boundary=\"?([^\";]+)", headers.get("content-type", ""))
            _, described, content, _ = raw.split(b"--" + (boundary[1] if boundary else "").encode())
            name = query.get("name") or json.loads(described.partition(b"\r\n\r\n")[2])["name"]
            data = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
        else:
            name, data = query["name"], raw
        made = self._store(bucket, name, data, match)
        if made is None:
            return _error(412, "conditionNotMet", "At least one precondition did not hold.")
        return _json(_object_json(bucket, name, made))


def _part(one: Object, headers: Mapping[str, str]) -> Answer:
    if (wanted := headers.get("if-match")) and wanted != _etag(one):
        return _error(412, "PreconditionFailed", "At least one precondition did not hold.")
    if headers.get("if-none-match") == _etag(one):
        return Answer(status=304)
    span = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
    if span is None:
        return Answer(data=one.data, headers=_object_headers(one))
    size = len(one.data)
    first = int(span[1]) if span[1] else max(0, size - int(span[2]))
    last = min(int(span[2]), size - 1) if span[1] and span[2] else size - 1
    if first >= size:
        return _error(416, "InvalidRange", "The requested range cannot be satisfied.")
    range_headers = {"Content-Range": f"bytes {first}-{last}/{size}"}
    return Answer(status=206, data=one.data[first : last + 1], headers=_object_headers(one) | range_headers)


def _object_headers(one: Object) -> dict[str, str]:
    return {
        "ETag": _etag(one),
        "Last-Modified": format_datetime(one.updated, usegmt=True),
        "Content-Type": one.kind,
        "x-goog-generation": str(one.generation),
        "x-goog-hash": f"md5={base64.b64encode(one.md5).decode()}",
    }


def _etag(one: Object) -> str:
    return f'"{one.md5.hex()}"'


def _iso(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _bucket(name: str) -> dict[str, str]:
    return {"kind": "storage#bucket", "id": name, "name": name, "location": "US", "storageClass": "STANDARD"} | {
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}
    }


def _object_json(bucket: str, name: str, one: Object) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(one.data)),
        "generation": str(one.generation),
        "metageneration": "1",
        "updated": _iso(one.updated),
        "contentType": one.kind,
        "etag": _etag(one),
        "md5Hash": base64.b64encode(one.md5).decode(),
        "mediaLink": f"https://storage.googleapis.com/download/storage/v1/b/{bucket}/o/{name}?alt=media",
    }


def _json(value: object) -> Answer:
    return Answer(data=json.dumps(value).encode(), headers={"Content-Type": "application/json"})


def _xml(root: str, inner: str, headers: Mapping[str, str] | None = None) -> Answer:
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?><{root} xmlns="http://doc.s3.amazonaws.com/2006-03-01">{inner}</{root}>'
    )
    return Answer(data=text.encode(), headers={**(headers or {}), "Content-Type": "application/xml"})


def _error(status: int, code: str, message: str) -> Answer:
    value = {"error": {"code": status, "message": message, "errors": [{"reason": code, "message": message}]}}
    return Answer(status=status, data=json.dumps(value).encode(), headers={"Content-Type": "application/json"})
