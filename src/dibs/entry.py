"""``with`` what is a block itself: an ``__enter__`` that returns its object, and lets no Ctrl-C in on the way.

Python looks for signals where a function that is written in Python begins, so one of those could lose what has just
been taken in ``with claims.take(…)``: it is not in its block yet, and nothing would be left of it but its ttl. This one
is written in C.
"""

from functools import lru_cache, partial

# Of an iterator that has ended, ``next`` returns what it is given for that case. A cache that keeps nothing is here for
# what no other callable in C does: it is bound to its object, as a method.
itself = lru_cache(maxsize=0)(partial(next, iter(())))
