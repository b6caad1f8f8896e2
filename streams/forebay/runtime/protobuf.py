"""Classes of protobuf messages without generated code. Requires the package `protobuf`, of the extras that use gRPC.

Only the numbers of fields and their types are on the wire. So a table of them replaces a `.proto` file, the messages
may have other names, and fields that are missing in the table are skipped.
"""

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

# Number and type of each field, by message. A type in a list is repeated. A text is the name of a message of the table.
# Maps are repeated entries.
Fields = Mapping[str, Mapping[str, tuple[int, Any]]]

INT64, UINT32, UINT64 = Field.TYPE_INT64, Field.TYPE_UINT32, Field.TYPE_UINT64
FLOAT, DOUBLE = Field.TYPE_FLOAT, Field.TYPE_DOUBLE
_SCALARS = {str: Field.TYPE_STRING, bytes: Field.TYPE_BYTES, bool: Field.TYPE_BOOL, int: Field.TYPE_INT32}


def message_classes(package: str, fields: Fields, unions: Collection[str] = ()) -> dict[str, Any]:
    """Return the class of each message in a table. A message in `unions` has at most one of its fields."""
    file = FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, declared in fields.items():
        message = file.message_type.add(name=name)
        if name in unions:
            message.oneof_decl.add(name="choice")
        for field, (number, kind) in declared.items():
            label = Field.LABEL_REPEATED if isinstance(kind, list) else Field.LABEL_OPTIONAL
            one = kind[0] if isinstance(kind, list) else kind
            added = message.field.add(name=field, number=number, label=label)
            if name in unions:
                added.oneof_index = 0
            if isinstance(one, str):
                added.type, added.type_name = Field.TYPE_MESSAGE, f".{package}.{one}"
            else:
                added.type = _SCALARS.get(one, one)
    pool = DescriptorPool()  # of its own, because other packages may register messages of the same names
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in fields}
