-- Jobs whose end somebody waits for in a process without a node, until when: the transaction that ends one of them notifies.
CREATE TABLE ostler.waiters (
  job   bigint NOT NULL PRIMARY KEY,
  until bigint NOT NULL
);
