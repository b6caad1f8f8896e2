"""Names of the checks that a replay may skip. Separate from the replay, because options name them."""

FOREIGN_RECORDS, UNREAD_FIELDS, UNKNOWN_EVENTS = "foreign-records", "unread-fields", "unknown-events"
MISSING_SNAPSHOTS, FOREIGN_PROGRESS, SCALING_RULES = "missing-snapshots", "foreign-progress", "scaling-rules"
UNVERIFIED = {
    FOREIGN_RECORDS: "journal records that no owner wrote",
    UNREAD_FIELDS: "journal records with fields or an encoding that this version does not write",
    UNKNOWN_EVENTS: "events of types that this version does not know",
    MISSING_SNAPSHOTS: "snapshots whose chunks are missing",
    FOREIGN_PROGRESS: "progress events from workers that were not selected (ignored)",
    SCALING_RULES: "scaling decisions by the rules of another version",
}
