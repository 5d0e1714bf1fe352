"""PostgreSQL's history of grants: a table that triggers on the leases fill, whoever writes there.

A lease's row tells what happened to it. Its claim becomes NULL, or '' with another end: released (and kept). It becomes
'' with the same end: broken. Another token takes its place before its end: transferred. It becomes NULL with the same
end, another token takes its place later, or its row is deleted: it had expired. A renewal changes none of this, and
fires no trigger.

The function acts with the rights of whoever set it up: roles that run dibs need none on the table, except to read it.
"""

from __future__ import annotations

KEEP = """\
CREATE TABLE IF NOT EXISTS {history} (    -- who had which name: the last {keep} grants of each
    name          text COLLATE "C" NOT NULL,
    fencing_token bigint NOT NULL,
    slot          integer NOT NULL,
    holder        text,
    acquired_at   timestamptz NOT NULL,
    ended_at      timestamptz,            -- NULL: it is in force, or has expired and nobody got the name since
    ending        text,                   -- released, expired, broken, transferred
    info          text,
    PRIMARY KEY (name, fencing_token)
) WITH (fillfactor = 70);
CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS {quote}
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.claim_id <> '' THEN
        UPDATE {history} AS h SET
            ending = CASE
                WHEN NEW.fencing_token <> OLD.fencing_token AND OLD.expires_at > NEW.acquired_at THEN 'transferred'
                WHEN NEW.fencing_token <> OLD.fencing_token THEN 'expired'
                WHEN NEW.expires_at <> OLD.expires_at THEN 'released'
                WHEN NEW.claim_id = '' THEN 'broken' ELSE 'expired' END,
            ended_at = CASE
                WHEN NEW.fencing_token <> OLD.fencing_token THEN least(OLD.expires_at, NEW.acquired_at)
                WHEN NEW.claim_id = '' THEN clock_timestamp() ELSE NEW.expires_at END
        WHERE h.name = OLD.name AND h.fencing_token = OLD.fencing_token AND h.ended_at IS NULL;
    ELSIF TG_OP = 'DELETE' THEN
        UPDATE {history} AS h SET ending = 'expired', ended_at = OLD.expires_at
        WHERE h.name = OLD.name AND h.fencing_token = OLD.fencing_token AND h.ended_at IS NULL;
        RETURN NULL;
    END IF;
    IF NEW.claim_id <> '' AND (TG_OP = 'INSERT' OR NEW.fencing_token <> OLD.fencing_token) THEN
        INSERT INTO {history} (name, fencing_token, slot, holder, acquired_at, info)
        VALUES (NEW.name, NEW.fencing_token, NEW.slot, NEW.holder, NEW.acquired_at, NEW.info)
        ON CONFLICT DO NOTHING;
        DELETE FROM {history} AS h WHERE h.name = NEW.name AND h.fencing_token <= (
            SELECT o.fencing_token FROM {history} AS o WHERE o.name = NEW.name
            ORDER BY o.fencing_token DESC LIMIT 1 OFFSET {keep});
    END IF;
    RETURN NULL;
END {quote};
DROP TRIGGER IF EXISTS {changed} ON {lease};
CREATE TRIGGER {changed} AFTER UPDATE ON {lease} FOR EACH ROW
    WHEN (OLD.claim_id IS DISTINCT FROM NEW.claim_id OR OLD.fencing_token <> NEW.fencing_token)
    EXECUTE FUNCTION {function}();
DROP TRIGGER IF EXISTS {made} ON {lease};
CREATE TRIGGER {made} AFTER INSERT OR DELETE ON {lease} FOR EACH ROW EXECUTE FUNCTION {function}();
-- Those who hold now.
INSERT INTO {history} (name, fencing_token, slot, holder, acquired_at, info)
SELECT name, fencing_token, slot, holder, acquired_at, info FROM {lease}
WHERE claim_id <> '' AND expires_at > clock_timestamp() ON CONFLICT DO NOTHING;
"""
FORGET = """\
DROP TRIGGER IF EXISTS {changed} ON {lease};
DROP TRIGGER IF EXISTS {made} ON {lease};
DROP FUNCTION IF EXISTS {function}();
DROP TABLE IF EXISTS {history};
"""

READ = """\
SELECT h.slot, h.holder, h.fencing_token, h.acquired_at, coalesce(h.ended_at, l.expires_at),
    coalesce(h.ending, CASE WHEN l.expires_at IS NOT NULL THEN 'expired' END), h.info
FROM {history} AS h LEFT JOIN {lease} AS l
    ON l.name = h.name AND l.slot = h.slot AND l.fencing_token = h.fencing_token AND l.expires_at <= clock_timestamp()
WHERE h.name = $1 ORDER BY h.fencing_token DESC LIMIT $2::bigint
"""
# Qualified with the schema, except triggers, which belong to their table.
NAMES = {"history": "_history", "function": "_hist"}
TRIGGERS = {"changed": "_hist_ends", "made": "_hist_made"}
