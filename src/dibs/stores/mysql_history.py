"""MySQL's history of grants: a table that triggers on the leases fill, whoever writes there.

A lease's row tells what happened to it. Its claim becomes NULL, or '' with another end: released (and kept). It becomes
'' with the same end: broken. Another token takes its place before its end: transferred. It becomes NULL with the same
end, another token takes its place later, or its row is deleted: it had expired. Triggers fire for renewals, too, where
there is no WHEN; what they look up then is nothing.

Each trigger is one statement, so that they can be read from a file without another delimiter. They act with the rights
of whoever set them up: logins that run dibs need none on the table, except to read it.
"""

from __future__ import annotations

_IS_GRANT = "NEW.claim_id <> '' AND NEW.fencing_token <> OLD.fencing_token"
_IS_END = "OLD.claim_id <> '' AND (NOT NEW.claim_id <=> OLD.claim_id OR NEW.fencing_token <> OLD.fencing_token)"
# (The row's own time of a grant is what a client takes for the server's. Here it must not lie before the last end.)
_INSERT = """\
INSERT IGNORE INTO {{history}} (name, fencing_token, slot, holder, acquired_at, info)
    SELECT NEW.name, NEW.fencing_token, NEW.slot, NEW.holder, UTC_TIMESTAMP(6), NEW.info FROM DUAL WHERE {when}"""
_TRIM = """\
DELETE FROM {{history}} WHERE name = IF({when}, NEW.name, NULL) AND fencing_token <= (
    SELECT x.fencing_token FROM (SELECT o.fencing_token FROM {{history}} AS o WHERE o.name = IF({when}, NEW.name, NULL)
    ORDER BY o.fencing_token DESC LIMIT 1 OFFSET {{keep}}) AS x)"""
_EXPIRE = """\
UPDATE {history} SET ending = 'expired', ended_at = OLD.expires_at
    WHERE name = OLD.name AND fencing_token = OLD.fencing_token AND ended_at IS NULL"""
_END = f"""\
UPDATE {{history}} SET
    ending = CASE
        WHEN NEW.fencing_token <> OLD.fencing_token AND OLD.expires_at > UTC_TIMESTAMP(6) THEN 'transferred'
        WHEN NEW.fencing_token <> OLD.fencing_token THEN 'expired'
        WHEN NEW.expires_at <> OLD.expires_at THEN 'released' WHEN NEW.claim_id = '' THEN 'broken' ELSE 'expired' END,
    ended_at = CASE
        WHEN NEW.fencing_token <> OLD.fencing_token THEN LEAST(OLD.expires_at, UTC_TIMESTAMP(6))
        WHEN NEW.claim_id = '' THEN UTC_TIMESTAMP(6) ELSE NEW.expires_at END
    WHERE name = IF({_IS_END}, OLD.name, NULL) AND fencing_token = OLD.fencing_token AND ended_at IS NULL"""
_TRIGGERS = {
    "made": ("INSERT", _INSERT.format(when="NEW.claim_id <> ''")),
    "made_trim": ("INSERT", _TRIM.format(when="NEW.claim_id <> ''")),
    "ended": ("UPDATE", _END),
    "granted": ("UPDATE", _INSERT.format(when=_IS_GRANT)),
    "granted_trim": ("UPDATE", _TRIM.format(when=_IS_GRANT)),
    "purged": ("DELETE", _EXPIRE),
}

FORGET = "".join(f"DROP TRIGGER IF EXISTS {{{trigger}}};\n" for trigger in _TRIGGERS)
KEEP = (
    """\
CREATE TABLE IF NOT EXISTS {history} (      -- who had which name: the last {keep} grants of each
    name          VARBINARY(400) NOT NULL,
    fencing_token BIGINT NOT NULL,
    slot          INT NOT NULL,
    holder        VARCHAR(1000),
    acquired_at   DATETIME(6) NOT NULL,
    ended_at      DATETIME(6),              -- NULL: it is in force, or has expired and nobody got the name since
    ending        VARCHAR(20),              -- released, expired, broken, transferred
    info          TEXT,
    PRIMARY KEY (name, fencing_token)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, DEFAULT CHARACTER SET utf8mb4;
"""
    + FORGET
    + "".join(
        f"CREATE TRIGGER {{{trigger}}} AFTER {event} ON {{lease}} FOR EACH ROW\n    {body};\n"
        for trigger, (event, body) in _TRIGGERS.items()
    )
    + """\
-- Those who hold now.
INSERT IGNORE INTO {history} (name, fencing_token, slot, holder, acquired_at, info)
SELECT name, fencing_token, slot, holder, acquired_at, info FROM {lease}
WHERE claim_id <> '' AND expires_at > UTC_TIMESTAMP(6);
"""
)
FORGET += "DROP TABLE IF EXISTS {history};\n"

READ = """\
SELECT h.slot, h.holder, h.fencing_token, TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', h.acquired_at),
TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', COALESCE(h.ended_at, l.expires_at)),
COALESCE(h.ending, IF(l.expires_at IS NULL, NULL, 'expired')), h.info
FROM {history} AS h LEFT JOIN {lease} AS l ON l.name = h.name AND l.slot = h.slot
AND l.fencing_token = h.fencing_token AND l.expires_at <= UTC_TIMESTAMP(6)
WHERE h.name = x'%s' ORDER BY h.fencing_token DESC LIMIT %d"""
NAMES = {
    "history": "_history",
    "made": "_hist_made",
    "made_trim": "_hist_trim",
    "ended": "_hist_ends",
    "granted": "_hist_next",
    "granted_trim": "_hist_cut",
    "purged": "_hist_purg",
}
