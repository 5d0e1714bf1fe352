"""Leases of dibs in a directory on a shared file system: ``dibs.connect("directory:///mnt/share/locks")``.

``baton`` is what a file server can be trusted to do at once, and ``store`` makes the contract of dibs out of it.
"""

from __future__ import annotations

from dibs_shared_directory.store import address

__all__ = ["address"]
