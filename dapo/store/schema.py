"""The tables of run.db, documented in docs/reference/run-database.md. Any change here must raise SCHEMA_VERSION."""

APPLICATION_ID = 0x6461706F  # "dapo"
SCHEMA_VERSION = 4

# Uses only what SQLite 3.26 understands: Python on some clusters is still linked with it.
SCHEMA = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE prompts (
    uid TEXT PRIMARY KEY,
    first_step INTEGER NOT NULL,
    data_source TEXT NOT NULL,
    messages TEXT NOT NULL,
    answer TEXT NOT NULL,
    extra TEXT NOT NULL,
    tokens BLOB
);

CREATE TABLE groups (
    serial INTEGER PRIMARY KEY,
    prompt_uid TEXT NOT NULL REFERENCES prompts (uid),
    generated_step INTEGER NOT NULL,
    decided_step INTEGER,
    verdict TEXT NOT NULL
);
CREATE INDEX groups_by_generated_step ON groups (generated_step, verdict);
CREATE INDEX groups_by_decided_step ON groups (decided_step, verdict);
CREATE INDEX groups_by_prompt ON groups (prompt_uid, generated_step);

-- The long texts are the last columns, so that a query over rewards does not read it.
CREATE TABLE rollouts (
    serial INTEGER NOT NULL REFERENCES groups (serial) ON DELETE CASCADE,
    sample INTEGER NOT NULL,
    weight_version INTEGER NOT NULL,
    length INTEGER NOT NULL,
    finish_reason TEXT NOT NULL,
    score REAL,
    acc INTEGER,
    reward REAL,
    advantage REAL,
    trains INTEGER NOT NULL,
    switches TEXT NOT NULL,
    error TEXT,
    extracted TEXT,
    extras TEXT NOT NULL,
    given TEXT NOT NULL,
    turns TEXT NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (serial, sample)
);
-- Covers the statistics over many responses: they never read the texts, which are most of the table.
CREATE INDEX rollouts_figures ON rollouts (serial, acc, score, reward, length, error);

-- Separate from rollouts, because these bytes are most of the file and few queries need them.
CREATE TABLE rollout_tokens (
    serial INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    sampler_logprobs BLOB NOT NULL,
    policy_logprobs BLOB,
    entropy BLOB,
    PRIMARY KEY (serial, sample),
    FOREIGN KEY (serial, sample) REFERENCES rollouts (serial, sample) ON DELETE CASCADE
);

-- The history of each prompt, group by group: the history that algorithm.ledger uses.
CREATE VIEW prompt_history AS
SELECT prompt_uid, serial, generated_step AS step, verdict,
       sum(error IS NULL) AS judged, sum(acc) AS correct, avg(score) AS mean_score
FROM groups JOIN rollouts USING (serial)
GROUP BY serial;

CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    time REAL NOT NULL
);

-- Clustered by name: the curve of one metric is one contiguous read.
CREATE TABLE metrics (
    name TEXT NOT NULL,
    step INTEGER NOT NULL REFERENCES steps (step),
    value REAL,
    PRIMARY KEY (name, step)
) WITHOUT ROWID;
CREATE INDEX metrics_by_step ON metrics (step);

CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    name TEXT NOT NULL,
    time REAL NOT NULL,
    metrics TEXT NOT NULL,
    UNIQUE (step, name)
);

CREATE TABLE eval_samples (
    evaluation INTEGER NOT NULL REFERENCES evaluations (id) ON DELETE CASCADE,
    prompt_uid TEXT NOT NULL REFERENCES prompts (uid),
    sample INTEGER NOT NULL,
    weight_version INTEGER NOT NULL,
    length INTEGER NOT NULL,
    finish_reason TEXT NOT NULL,
    score REAL,
    acc INTEGER,
    error TEXT,
    extracted TEXT,
    extras TEXT NOT NULL,
    given TEXT NOT NULL,
    turns TEXT NOT NULL,
    text TEXT NOT NULL
);
CREATE INDEX eval_samples_by_evaluation ON eval_samples (evaluation, prompt_uid);
CREATE INDEX eval_samples_by_prompt ON eval_samples (prompt_uid);

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    message TEXT NOT NULL
);
"""
