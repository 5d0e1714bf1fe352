"""What ``dibs --help`` says beneath the list of commands. Of its own, since no other start reads it."""

from __future__ import annotations

EPILOG = """\
examples:
  dibs run nightly -- ./backup.sh           run it once nobody else does, however long that takes
  dibs run nightly --nowait -- ./backup.sh  the same, but exit 75 at once when somebody else has it
  dibs elect scheduler -- ./scheduler       on every machine: one runs it, the others stand by to take over
  dibs put mail '{"to": "ann"}'             put a job into a queue
  dibs work mail -- ./send-mail             on any machine: run a command for each job, its payload on standard input
  dibs queues                               how many wait, are worked, and are dead
  dibs advise mail                          how many workers the queue needs, and why
  dibs ls                                   who holds what
  dibs show nightly                         who holds "nightly", since when, for how long still
  dibs top                                  the same, live
  dibs pause 'deploy/*' --note 'OPS-7'      no new grants for an hour; holders finish, waiters are told
  dibs doctor                               can the store be reached, and what does it promise
  dibs bench                                how many locks a second it gives from here
  export DIBS_URL=postgresql://app@db/prod  use PostgreSQL, for more than one machine (a password goes into
                                            ~/.pgpass or $PGPASSWORD, not into a URL that `ps` shows)

T is a duration: 30 or 1.5 are seconds; 500ms, 10m, 2h and 30d are what they look like.

exit codes:
  0 done, 64 wrong usage, 69 store unreachable, 74 answer not written, 75 held by another, 76 lease lost, 78 not set up
  or misconfigured; `dibs run`, `elect` and `claim` otherwise exit as their command does: with its own code, or 128+n
  when signal n ended it

`dibs COMMAND --help` tells more about each.
"""
