-- Roles of the catalog; psql runs this once, as a superuser, connected to the database that becomes the catalog.
--
--   kvgw_owner   owns the database; `kvgw migrate` makes and changes tables as it
--   kvgw_app     what gateways connect as: row-level security applies to it, it owns nothing and makes nothing
--
-- The passwords come from files, so that they appear neither in this file nor in a command line. Elsewhere than in
-- docker-compose.yml: psql --set=secrets=FOLDER --dbname=kvgw --file=roles.sql
\set ON_ERROR_STOP on
\if :{?secrets}
\else
    \set secrets /run/secrets
\endif
\set owner_file :secrets /db-owner-password
\set app_file :secrets /db-app-password
\set owner_password `cat :'owner_file'`
\set app_password `cat :'app_file'`

BEGIN;
CREATE ROLE kvgw_owner LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD :'owner_password';
CREATE ROLE kvgw_app LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD :'app_password';
SELECT format('ALTER DATABASE %I OWNER TO kvgw_owner', current_database())
UNION ALL SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC', current_database())
UNION ALL SELECT format('GRANT CONNECT ON DATABASE %I TO kvgw_app', current_database()) \gexec
-- Nobody but the owner makes objects in the schema; `kvgw migrate` grants kvgw_app what gateways need on each table.
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
COMMIT;
