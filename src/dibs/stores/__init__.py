"""The places where leases can be kept: one module a store, each loaded only when its URL is used."""
