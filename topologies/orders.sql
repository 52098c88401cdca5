-- The table that topologies/orders.toml keeps: one row an order, its highest version.
CREATE TABLE orders (
    order_id    text PRIMARY KEY,
    event_id    text NOT NULL,
    customer_id text NOT NULL,
    status      varchar(16) NOT NULL,
    qty         integer NOT NULL CHECK (qty > 0),
    price       numeric(10, 2) NOT NULL,
    total       double precision NOT NULL,
    version     bigint NOT NULL,
    created_at  timestamptz NOT NULL,
    deleted     boolean NOT NULL DEFAULT false
);
