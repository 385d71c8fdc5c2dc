-- API keys: only their SHA-256 is kept here. `dunlin key add NAME` makes a key, shows it once and prints its entry.
-- `tenant` decides whose cached prefixes are shared; `labels` is what policies see (policies/tiers.lua reads `tier`).
-- The entry below is an example of the form (the hash is that of the word "secret").
return {
  -- { hash = "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b",
  --   tenant = "acme", id = "acme-batch", labels = { tier = "gold" } },
}
