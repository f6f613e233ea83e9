"""``headlong bench``: measures a running server over HTTP, speculation on against off in one interleaved run."""
