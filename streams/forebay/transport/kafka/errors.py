"""Classify errors of Kafka: whether a later attempt may succeed.

aiokafka marks its errors as `retriable` for its own loops, which is not the question that a service has to answer. A
timeout, a broker that is away and a coordinator that moves are not `retriable` there, and none of them may end a
process. So forebay has a table of its own, with a verdict for each code of the protocol and each class of aiokafka.

Codes: https://kafka.apache.org/protocol#protocol_error_codes, up to Kafka 4.1.
"""

from collections.abc import Mapping

from aiokafka import errors
from aiokafka.errors import BrokerResponseError, KafkaError, for_code

from forebay.transport.base import LogError, LogUnavailable

# With these codes, the same request gets the same answer until an operator, a client or a program changes something.
# Brokers return others while they start, stop, elect leaders, move replicas or coordinators, or are overloaded,
# and to a member of a consumer group that has to join again. -1 is any exception in a broker. 2 (CORRUPT_MESSAGE) is
# damage on the way, because the bytes of a repeated batch are the same. `Wire.gone` bounds the attempts after 3
# (UNKNOWN_TOPIC_OR_PARTITION), and a member that leaves makes room after 81 (GROUP_MAX_SIZE_REACHED).
_PERMANENT = """
0 NONE, 1 OFFSET_OUT_OF_RANGE, 4 INVALID_FETCH_SIZE, 10 MESSAGE_TOO_LARGE, 12 OFFSET_METADATA_TOO_LARGE,
17 INVALID_TOPIC_EXCEPTION, 18 RECORD_LIST_TOO_LARGE, 21 INVALID_REQUIRED_ACKS, 23 INCONSISTENT_GROUP_PROTOCOL,
24 INVALID_GROUP_ID, 26 INVALID_SESSION_TIMEOUT, 28 INVALID_COMMIT_OFFSET_SIZE, 29 TOPIC_AUTHORIZATION_FAILED,
30 GROUP_AUTHORIZATION_FAILED, 31 CLUSTER_AUTHORIZATION_FAILED, 32 INVALID_TIMESTAMP,
33 UNSUPPORTED_SASL_MECHANISM, 34 ILLEGAL_SASL_STATE, 35 UNSUPPORTED_VERSION, 36 TOPIC_ALREADY_EXISTS,
37 INVALID_PARTITIONS, 38 INVALID_REPLICATION_FACTOR, 39 INVALID_REPLICA_ASSIGNMENT, 40 INVALID_CONFIG,
42 INVALID_REQUEST, 43 UNSUPPORTED_FOR_MESSAGE_FORMAT, 44 POLICY_VIOLATION, 45 OUT_OF_ORDER_SEQUENCE_NUMBER,
46 DUPLICATE_SEQUENCE_NUMBER, 47 INVALID_PRODUCER_EPOCH, 48 INVALID_TXN_STATE, 49 INVALID_PRODUCER_ID_MAPPING,
50 INVALID_TRANSACTION_TIMEOUT, 53 TRANSACTIONAL_ID_AUTHORIZATION_FAILED, 54 SECURITY_DISABLED,
55 OPERATION_NOT_ATTEMPTED, 57 LOG_DIR_NOT_FOUND, 58 SASL_AUTHENTICATION_FAILED, 59 UNKNOWN_PRODUCER_ID,
61 DELEGATION_TOKEN_AUTH_DISABLED, 62 DELEGATION_TOKEN_NOT_FOUND, 63 DELEGATION_TOKEN_OWNER_MISMATCH,
64 DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, 65 DELEGATION_TOKEN_AUTHORIZATION_FAILED, 66 DELEGATION_TOKEN_EXPIRED,
67 INVALID_PRINCIPAL_TYPE, 68 NON_EMPTY_GROUP, 69 GROUP_ID_NOT_FOUND, 73 TOPIC_DELETION_DISABLED,
76 UNSUPPORTED_COMPRESSION_TYPE, 82 FENCED_INSTANCE_ID, 85 NO_REASSIGNMENT_IN_PROGRESS,
86 GROUP_SUBSCRIBED_TO_TOPIC, 87 INVALID_RECORD, 90 PRODUCER_FENCED, 91 RESOURCE_NOT_FOUND,
92 DUPLICATE_RESOURCE, 93 UNACCEPTABLE_CREDENTIAL, 94 INCONSISTENT_VOTER_SET, 95 INVALID_UPDATE_VERSION,
96 FEATURE_UPDATE_FAILED, 97 PRINCIPAL_DESERIALIZATION_FAILURE, 98 SNAPSHOT_NOT_FOUND,
99 POSITION_OUT_OF_RANGE, 101 DUPLICATE_BROKER_REGISTRATION, 104 INCONSISTENT_CLUSTER_ID,
105 TRANSACTIONAL_ID_NOT_FOUND, 109 OFFSET_MOVED_TO_TIERED_STORAGE, 111 UNRELEASED_INSTANCE_ID,
112 UNSUPPORTED_ASSIGNOR, 114 MISMATCHED_ENDPOINT_TYPE, 115 UNSUPPORTED_ENDPOINT_TYPE,
117 UNKNOWN_SUBSCRIPTION_ID, 118 TELEMETRY_TOO_LARGE, 119 INVALID_REGISTRATION, 120 TRANSACTION_ABORTABLE,
121 INVALID_RECORD_STATE, 125 INVALID_VOTER_KEY, 126 DUPLICATE_VOTER, 127 VOTER_NOT_FOUND,
128 INVALID_REGULAR_EXPRESSION, 130 STREAMS_INVALID_TOPOLOGY, 132 STREAMS_TOPOLOGY_FENCED
"""
PERMANENT_CODES: Mapping[int, str] = {int(code): name for code, name in map(str.split, _PERMANENT.split(","))}
DENIED_CODES = frozenset({29, 30, 31, 53})
# Whether an error that a client raised by itself is transient. A subclass that is not listed has the verdict of its
# nearest listed base.
CLIENT_ERRORS: Mapping[type[KafkaError], bool] = {
    KafkaError: True,  # aiokafka wraps errors that it did not expect, for example of a heartbeat
    errors.Cancelled: True,
    errors.CommitFailedError: True,
    errors.CorrelationIdError: True,
    errors.KafkaConnectionError: True,
    errors.KafkaProtocolError: True,
    errors.KafkaTimeoutError: True,
    errors.KafkaUnavailableError: True,
    errors.MetadataEmptyBrokerList: True,
    errors.NoBrokersAvailable: True,
    errors.NodeNotReadyError: True,
    errors.QuotaViolationError: True,
    errors.StaleMetadata: True,
    errors.TooManyInFlightRequests: True,
    errors.AuthenticationFailedError: False,
    errors.AuthenticationMethodNotSupported: False,
    errors.IllegalArgumentError: False,
    errors.IllegalStateError: False,
    errors.IncompatibleBrokerVersion: False,
    errors.KafkaConfigurationError: False,
    errors.NoOffsetForPartitionError: False,
    errors.ProducerClosed: False,
    errors.ProducerFenced: False,
    errors.RecordTooLargeError: False,
    errors.UnrecognizedBrokerVersion: False,
    errors.UnsupportedCodecError: False,
}


def error_of(code: int, subject: str = "") -> KafkaError:
    """Return the error for an error code of the protocol other than 0, also for codes that aiokafka does not know."""
    kind = for_code(code)
    if kind.errno == code:
        error: KafkaError = kind(subject) if subject else kind()
        return error
    name = PERMANENT_CODES.get(code)
    text = f"error {code} of Kafka" if name is None else f"error {code} ({name})"
    error = BrokerResponseError(f"{subject}: {text}" if subject else text)
    error.errno = code
    return error


def is_transient(error: BaseException) -> bool:
    """Return whether a later request may succeed. Codes of newer brokers count, because a retry does no harm."""
    if isinstance(error, BrokerResponseError):
        return error.errno not in PERMANENT_CODES
    for kind in type(error).__mro__:
        if kind in CLIENT_ERRORS:
            return CLIENT_ERRORS[kind]
    return isinstance(error, OSError)  # includes TimeoutError


def log_error(error: BaseException, text: str) -> LogError:
    """Return the error of the log for a failed request, a LogUnavailable if a later request may succeed."""
    return LogUnavailable(text) if is_transient(error) else LogError(text)


def is_denied(error: BaseException) -> bool:
    """Return whether the broker has no ACL that permits the operation."""
    return isinstance(error, BrokerResponseError) and error.errno in DENIED_CODES


def explain(error: BaseException) -> str:
    """Return the message of a Kafka error as one line, or its type if the message is empty."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{text}: an ACL is missing; `forebay topics acls` lists the ACLs of each role" if is_denied(error) else text
